# SPDX-License-Identifier: Apache-2.0
"""Flags of `megatron-offload bench`: `add_arguments`, `check_arguments`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.offload.commands.flag_values import counts, size
from megatron.offload.commands.training_runs.trainer import OUTPUT
from megatron.offload.device.cuda import has_cuda
from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import GIB, MIB, format_size

HEADLINE_BLOCK_BYTES = 4 * MIB
MIN_BANDWIDTH_RATIO, MAX_CPU_RATIO = 0.95, 1.5
NUM_WAITING = 2  # transfers in a tier's queue beyond those under way
FULL = {"size": 2 * GIB, "blocks": [MIB, 4 * MIB, 16 * MIB], "depths": [1, 4, 8], "pairs": 5}
QUICK = {"size": 512 * MIB, "blocks": [4 * MIB], "depths": [4], "pairs": 3}

DESCRIPTION = """\
Measures bandwidth and processor time of the storage tiers, and those of fio if fio is installed.

  megatron-offload bench --directory /mnt/nvme/bench --json bench.json --plot bench.png
  megatron-offload bench --quick                     # half a minute: 4 MiB blocks, depth 4
  megatron-offload bench --tiers ssd --require       # exit code 1 if the SSD tier is behind fio

The tiers are called as training calls them: a write or a read is begun and waited for later, on
storages made by torch.empty. A tier has as many I/O threads as fio's iodepth, so that the drive
sees the same number of requests; two more transfers wait in its queue, so that a thread finds the
next one when it is done with the last. Each value comes from several rounds, fio and the tier right
after each other in alternating order: the tables show medians over the rounds, and the median of
the rounds' ratios. Both overwrite, or read, a file of the same size that was allocated and written
before, on the same file system: random data, blocks in order. In `mixed` every other transfer is a
read. fio always uses direct I/O.

CPU s/GB is processor time, user and system, for each GB moved: of fio's job, from its JSON output,
(usr_cpu + sys_cpu) percent of the runtime; of the tier, of this whole process with all threads.

The host tier is compared with a plain memcpy of the same blocks by as many threads; the tiered tier
(half of it in host memory) with fio, which has the drive alone. With --device cuda the storages are
in the GPU's memory; the host tier then stands alone.

Buffers on huge pages make direct I/O cheaper, on virtual drives also faster. On a CPU the command
starts itself again with the allocator that training uses, which asks for huge pages. fio is started
without it; --fio-hugepages gives it the same allocator, for a harsher comparison.

Exit code: 0; 1 if --require is not met; 2 if it could not be measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of the command."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--directory",
        type=Path,
        default=OUTPUT / "runs/offload",
        help="directory on the SSD, made if it is missing; nothing stays in it. Default: "
        "runs/offload",
    )
    what.add_argument("--tiers", default="ssd,host,tiered", help="default: ssd,host,tiered")
    what.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the storages are; default: cpu",
    )
    what.add_argument(
        "--io",
        choices=("auto", "buffered", "gds"),
        default="auto",
        help="buffered, gds: also measure the SSD tier with buffered I/O, as it works without "
        "O_DIRECT, or with GPUDirect Storage (needs --device cuda)",
    )
    what.add_argument("--blocks", type=_sizes, metavar="SIZE,...", help="default: 1MiB,4MiB,16MiB")
    what.add_argument("--depths", type=counts, metavar="N,...", help="default: 1,4,8")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--size",
        type=size,
        help="size of the files, all of which each round moves; default: 2GiB",
    )
    how.add_argument(
        "--seconds", type=float, help="length of each round, which then repeats the file"
    )
    how.add_argument("--pairs", type=int, metavar="N", help="rounds of each operation; default: 5")
    how.add_argument(
        "--quick",
        action="store_true",
        help="same as --blocks 4MiB --depths 4 --size 512MiB --pairs 3",
    )
    how.add_argument(
        "--fio-hugepages", action="store_true", help="start fio with training's allocator"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement and the ratios"
    )
    output.add_argument("--plot", type=Path, metavar="FILE", help="PNG or SVG; needs matplotlib")
    output.add_argument(
        "--headline-depth",
        type=int,
        default=4,
        metavar="N",
        help="queue depth that the ratios are given for; default: 4",
    )
    output.add_argument(
        "--require",
        action="store_true",
        help="exit code 1 if the SSD tier's headline ratios to fio are not met: bandwidth at least "
        f"{MIN_BANDWIDTH_RATIO}, processor time at most {MAX_CPU_RATIO}",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in defaults, and `args.kinds`: the tiers, and the other ways to the SSD.

    Raises:
        ConfigurationError: nothing could be measured.
    """
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    kinds = list(dict.fromkeys(filter(None, args.tiers.split(","))))
    if unknown := {*kinds} - {"ssd", "host", "tiered"}:
        raise ConfigurationError(
            f"--tiers: unknown {', '.join(sorted(unknown))}; choose from ssd, host, tiered"
        )
    args.kinds = [*kinds, *([f"ssd-{args.io}"] if args.io != "auto" else [])]
    if args.device == "cuda" and not has_cuda():
        raise ConfigurationError("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.io == "gds" and args.device != "cuda":
        raise ConfigurationError("--io gds reads and writes a GPU's memory; add --device cuda")
    if min(args.pairs, *args.depths, *args.blocks) < 1 or (args.seconds or 1) <= 0:
        raise ConfigurationError("--pairs, --depths, --blocks and --seconds must be above 0")
    least_bytes = 2 * (max(args.depths) + NUM_WAITING) * max(args.blocks)
    if args.size < least_bytes:
        raise ConfigurationError(
            f"--size must be at least {format_size(least_bytes)} for these blocks and depths"
        )
    if args.require and (
        "ssd" not in kinds
        or HEADLINE_BLOCK_BYTES not in args.blocks
        or args.headline_depth not in args.depths
    ):
        raise ConfigurationError(
            "--require needs the tier ssd, blocks of 4 MiB and the depth --headline-depth"
        )
    for path in (args.json, args.plot):
        if path and not path.resolve().parent.is_dir():
            raise ConfigurationError(f"no such folder: {path.resolve().parent}")


def _sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]
