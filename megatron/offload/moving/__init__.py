# SPDX-License-Identifier: Apache-2.0
"""What moves although a tier has its only copy: optimizer states, parameters, gradients.

`storage.py` is one of them and where it is; `only_copy.py` brings them and puts them away;
`order.py` has the rules of which are in memory. `states/` and `parameters/` decide when.

Note [Another stream]
Something else that moves and has no other copy needs a prefix in `errors.py`, a `Purpose` of its
tiers (`tiers/purpose.py`), settings that derive from `TierSettings`, and `open_only_copies` for the
tiers. Its bytes are in a `Bucket` (a `Layout` says which tensor lies where), or in a class of its
own that derives from `MovingStorage`. One `OnlyCopy` has all of them: `put_away`, `bring`,
`waiting` around what may wait, `note_peak`. When they move, its own file says;
`parameters/gradients.py` is the shortest example. `tests/behaviour/test_every_stream_alike.py` asks
it what it promises.
"""
