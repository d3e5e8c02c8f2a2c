# SPDX-License-Identifier: Apache-2.0
"""Operations that save less for backward than the framework's own; opt-in, compared with fp64."""
