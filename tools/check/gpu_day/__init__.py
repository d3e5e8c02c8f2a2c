# SPDX-License-Identifier: Apache-2.0
"""What gpu_day.py runs, part by part; `parts.py` has the list.

`settings` (what was asked for, sizes of models), `job` (a process with a time limit), the jobs
themselves (`machine`, `link`, `launches`, `drive`, `bits`, `training`, `commands`), and what is
made of their results: `results`, `tables`, `pictures`.
"""
