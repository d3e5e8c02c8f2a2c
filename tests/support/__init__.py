# SPDX-License-Identifier: Apache-2.0
"""What tests share: models, stages, devices, mounts, processes. Nothing here is a test."""
