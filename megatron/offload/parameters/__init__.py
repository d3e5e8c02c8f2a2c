# SPDX-License-Identifier: Apache-2.0
"""Parameters of layers that wait on a tier while other layers compute."""
