# SPDX-License-Identifier: Apache-2.0
"""How what autograd saved is taken over, and handed back: hooks, contexts, layers."""
