# SPDX-License-Identifier: Apache-2.0
"""What moves and has no other copy: optimizer states, parameters, gradients.

`storage.py` is one of them and where it is; `only_copy.py` brings them and puts them away;
`order.py` says in which order. `states/` and `parameters/` say when.
"""
