# SPDX-License-Identifier: Apache-2.0
"""Trainings that are run to be measured: started, read, compared with each other."""
