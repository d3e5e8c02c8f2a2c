# SPDX-License-Identifier: Apache-2.0
"""What moves although a tier has its only copy: optimizer states, parameters, gradients.

`storage.py` is one of them and where it is; `only_copy.py` brings them and puts them away;
`order.py` has the rules of which are in memory. `states/` and `parameters/` decide when.

Note [Another stream]
The states of a new optimizer need nothing: `states/` moves each that is as large as its parameter.
Something else that moves and has no other copy needs a prefix, among `_PREFIXES` in `errors.py`, a
`Purpose` of its tiers (`tiers/purpose.py`), settings that derive from `TierSettings`, and
`open_only_copies` for the tiers. Its bytes are in a `Bucket` (a `Layout` says which tensor lies
where), or in a class of its own that derives from `MovingStorage`, which names what it may replace.
One `OnlyCopy` has all of them: `put_away`, `bring`, `waiting` around what may wait, `note_peak`,
`warn_of_refused` once a step. When they move, its own file says: `parameters/gradients.py` is the
shortest example of that, `states/open.py` of tiers and settings. Its owner has an `OwnProcess`,
which a child process meets, and `close_when_dropped`; its handle says what it counted.

Retries, out of memory, checksums, host budgets, wear and the timeline's tracks come with these. For
`tests/behaviour/test_every_stream_alike.py`, which asks it what it promises, it is one of `STREAMS`
in `tests/support/streams.py`. Users reach its settings through `keywords.py`, `settings_file.py`,
`integration/torch/whole_training.py` and `integration/megatron/arguments.py`.
"""
