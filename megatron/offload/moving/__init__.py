# SPDX-License-Identifier: Apache-2.0
"""What moves although a tier has its only copy: optimizer states, parameters, gradients.

`storage.py` is one of them and where it is; `only_copy.py` brings them and puts them away;
`order.py` has the rules of which are in memory. `states/` and `parameters/` decide when.

Note [Another stream]
The states of a new optimizer need nothing: `states/` moves each that is as large as its parameter.
Something else that moves and has no other copy needs a prefix, among `_PREFIXES` in `errors.py`, a
`Purpose` of its tiers (`tiers/purpose.py`), settings that derive from `TierSettings`, and
`open_only_copies` for the tiers. Its bytes are in a class that derives from `MovingStorage`, which
names what it may replace; what belongs to parameters, in a `Bucket` (a `Layout` says which tensor
lies where). One `OnlyCopy` has all of them: `put_away`, `bring`, `waiting` around what may wait,
`note_peak`, and at the end of each step `warn_of_refused`, which warns once. When they move, its
own file says: `parameters/gradients.py` is the shortest example of that, on the tiers of
parameters; `config.py` and `open.py` beside it, of settings and tiers. Its owner has an
`OwnProcess`, which a child process meets, and `close_when_dropped`, as `parameters/window.py` has.
Its handle derives from `Handle` (`integration/open_streams.py`) and says what it counted. A folder
of its own has a row in docs/architecture.md, "The order of rooms".

Retries, out of memory, checksums, host budgets, wear and the timeline's tracks come with these. For
`tests/behaviour/test_every_stream_alike.py`, which asks it what it promises, it is one of `STREAMS`
in `tests/support/streams.py`. Users reach its settings through `offload_model.py` in
`integration/torch/`, `arguments.py` and `whole_training.py` in `integration/megatron/`, and
`integration/settings_file.py`; `tools/write_flags.py` writes `keywords.py` and docs/flags.md.
"""
