# SPDX-License-Identifier: Apache-2.0
"""What autograd saves: records of saved storages, and the hooks that swap them in and out."""
