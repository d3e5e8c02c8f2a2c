# SPDX-License-Identifier: Apache-2.0
"""What moves although a tier has its only copy: optimizer states, parameters, gradients.

`storage.py` is one of them and where it is; `only_copy.py` brings them and puts them away;
`order.py` has the rules of which are in memory. `states/` and `parameters/` decide when.
"""
