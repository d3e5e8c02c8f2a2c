# SPDX-License-Identifier: Apache-2.0
"""Every setting of activation offload, once: `OffloadConfig`.

The command-line flags, their help texts and the checks of their values all come from the fields
of this dataclass (`integration/megatron/arguments.py` builds the argparse group). Never touches
the file system; tiers check directories when they are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.offload.errors import ConfigurationError
from megatron.offload.flag import flag
from megatron.offload.layer_set import LayerSet
from megatron.offload.sizes import MIB, format_size, parse_size
from megatron.offload.tier_settings import ON_HOST, ON_SSD, TierSettings, io_flag, tier_flag
from megatron.offload.values import count_or_word, parse_path, parse_slowdown

DEFAULT_INFLIGHT_BYTES = 512 * MIB  # raised to what the largest layer asks for


@dataclass(frozen=True)
class OffloadConfig(TierSettings):
    """Where activations go and within which bounds. Sizes in bytes.

    Raises:
        ConfigurationError: the values contradict each other (checked on construction).
    """

    group: ClassVar[str] = "activation offload"
    flags: ClassVar[str] = "--activation-offload-"
    # As the doors call it.
    other_names: ClassVar[Mapping[str, str]] = {"--activation-offload-dir": "directory"}

    mode: str = flag(
        "--activation-offload",
        "off",
        "off: activations stay in device memory. keep: they stay too, except those that "
        "--activation-replay computes again. ssd: every activation of at least "
        "--activation-offload-min-bytes is written to --activation-offload-dir during the forward "
        "pass and read back before the backward pass needs it. host: the same, to host memory. "
        "tiered: to host memory and SSD together, in proportion to their measured bandwidth. "
        "auto: the first steps are measured with everything offloaded, then each layer's attention "
        "and MLP stay, are recomputed or go to host memory or SSD, whatever takes the least time "
        "within --activation-memory-budget. Results are bit-identical.",
        choices=("off", "keep", "ssd", "host", "tiered", "auto"),
    )
    directories: tuple[Path, ...] = tier_flag(
        "--activation-offload-dir",
        "directory on the SSD for activations, or several on different SSDs, over which large "
        "storages are striped. Each rank keeps one unlinked file in each, so nothing is left "
        "behind however the run ends.",
    )
    offload_layers: LayerSet | None = flag(
        "--activation-offload-layers",
        None,
        "layers whose activations leave device memory, by their numbers in the whole model, for "
        "example 1-8,12 or all; put encoder. or decoder. in front where both have that number. "
        "The other layers keep theirs. Default: all that are not recomputed.",
        parse=LayerSet.parse,
        metavar="LAYERS",
    )
    recompute_layers: LayerSet | None = flag(
        "--activation-recompute-layers",
        None,
        "layers that keep their input only and run forward again in backward, written as above.",
        parse=LayerSet.parse,
        metavar="LAYERS",
    )
    recompute_input: str | None = flag(
        "--activation-recompute-input",
        None,
        "where the inputs of recomputed layers wait until these run again. keep: in device memory. "
        "host: in host memory, written when the layer has run and read ahead of its recomputation. "
        "ssd: the same, on --activation-offload-dir. tiered: the same, on both together. auto "
        "takes keep only: its plan chooses. Default: keep; with Megatron's own "
        "--recompute-granularity full, where --activation-offload says; with auto, where the plan "
        "says.",
        choices=("keep", "host", "ssd", "tiered"),
    )
    boundary: str = flag(
        "--activation-boundary",
        "keep",
        "where hidden states wait between two units of a layer-major step, and their gradients in "
        "backward. keep: in device memory, those of all micro-batches. host, ssd, tiered: as with "
        "--activation-offload, and those of a few micro-batches in device memory.",
        choices=("keep", "host", "ssd", "tiered"),
    )
    memory_budget_bytes: int | None = flag(
        "--activation-memory-budget",
        None,
        "with auto: most device memory that the activations of a rank may take at any time, for "
        "example 12GiB. Default: nine tenths of what is free on the GPU when the plan is made; on "
        "a CPU half of what is free, divided by the ranks of the machine.",
        parse=parse_size,
        metavar="SIZE",
    )
    max_slowdown: float | None = flag(
        "--activation-offload-max-slowdown",
        None,
        "with auto: take as little memory as a step that is slower by this fraction allows, for "
        "example 0.02, instead of as little time as a budget allows. With a budget as well: as "
        "little time as that allows, and an error if the step is slower than this.",
        parse=parse_slowdown,
        metavar="FRACTION",
    )
    plan_file: Path | None = flag(
        "--activation-offload-plan",
        None,
        "with auto: follow the plan in this file from the first step on and make no other; "
        "where there is no such file yet, write the plan to it.",
        parse=parse_path,
        metavar="FILE",
    )
    min_bytes: int = flag(
        "--activation-offload-min-bytes",
        MIB,
        "smaller storages stay in device memory: they hold few bytes and cost as many operations.",
        parse=parse_size,
        metavar="SIZE",
    )
    granularity: str = flag(
        "--activation-offload-granularity",
        "operation",
        "when the tensors that a layer of Megatron has saved start to leave device memory. layer: "
        "after the whole layer. part: after its attention, then after its MLP. operation: after "
        "each linear layer, norm and core attention, so that forward holds little more than what "
        "it works on.",
        choices=("layer", "part", "operation"),
    )
    threads: int | None = tier_flag(
        "--activation-offload-threads",
        "I/O threads of each rank and directory: how many reads and writes a drive sees at once. "
        "Default: 4 for each disk that the directory is on (several in a RAID or striped volume), "
        "at most 32. On an accelerator each has a page-locked buffer of 16 MiB, and each directory "
        "up to 4 more.",
    )
    inflight_bytes: int | None = flag(
        "--activation-offload-inflight",
        None,
        "most bytes on their way to the tiers at any time, and most bytes read ahead of backward. "
        "Beyond it the forward pass waits for the drive, or on an accelerator for copies to host "
        "memory, instead of letting memory grow. Default: "
        "512MiB, or more where one layer (on a GPU two), or two storages of the largest size, "
        "have more bytes.",
        parse=parse_size,
        metavar="SIZE",
    )
    ssd_budget_bytes: int | None = tier_flag(
        "--activation-offload-ssd-budget",
        "most bytes of SSD space that a rank may take. Default: what the model's shape asks for. "
        "Activations beyond it stay in device memory.",
    )
    host_budget: int | float | None = tier_flag(
        "--activation-offload-host-budget",
        "most bytes of host memory that a rank may take, or a fraction of the machine's (or the "
        "container's) memory for all its ranks together, for example 0.4. Default: half of what is "
        "free at the start, divided by the ranks of the machine. Activations beyond it go to the "
        "SSD with tiered and stay in device memory with host.",
    )
    pinned_bytes: int | None = flag(
        "--activation-offload-pinned",
        None,
        "most bytes of a rank's pool of page-locked host memory, to which storages of an "
        "accelerator are copied on their way to SSDs: device memory is free when that copy has "
        "ended, and not when the drive has the bytes. Storages that find no room in it go through "
        "staging buffers, piece by piece. 0: everything goes through the staging buffers. Has no "
        "effect on a CPU or with io gds. Default: 2GiB, or less so that all ranks of the machine "
        "take a sixteenth of its memory at most.",
        parse=parse_size,
        metavar="SIZE",
    )
    io: str = io_flag(
        "--activation-offload-io",
        "direct: O_DIRECT, past the page cache, or an error where the file system lacks it. "
        "buffered: through the page cache, which is emptied behind each transfer. auto: direct "
        "where it works, else buffered with a line in the log. gds: GPUDirect Storage, between the "
        "GPU's memory and the SSD without host memory (needs a CUDA device and kvikio).",
        "gds",
    )
    write_bytes_per_s: float | None = tier_flag(
        "--activation-offload-write-limit",
        "most bytes per second that a rank writes to its SSDs, for example 500MB/s, which "
        "leaves bandwidth to other programs and spares the drive. Default: no limit.",
    )
    trace_file: Path | None = flag(
        "--activation-offload-trace",
        None,
        "write a timeline of the first 16 steps to this file: computing, writes, reads, waits, "
        "recomputation and memory, to be opened at ui.perfetto.dev or chrome://tracing. Rank 1 "
        "writes FILE with -rank1 before the extension, and so on.",
        parse=parse_path,
        metavar="FILE",
    )
    memory_report_file: Path | None = flag(
        "--activation-memory-report",
        None,
        "write to this file what the memory of three settled steps is made of, by layer and by "
        "what becomes of it; megatron-offload report shows the peak. Rank 1 writes FILE with "
        "-rank1 before the extension, and so on.",
        parse=parse_path,
        metavar="FILE",
    )
    replay: str | None = flag(
        "--activation-replay",
        None,
        "on: a saved tensor that is a cheap function of other saved tensors (a norm's output, an "
        "activation function's, a cast, a sum) is neither kept nor moved; backward computes it "
        "again from these, with the same bytes. Each kind is compared with what was saved when a "
        "layer first saves it. With auto a plan chooses which layers do so. off: all that autograd "
        "saves is kept or moved. Default: on, with every --activation-offload but off.",
        choices=("off", "on"),
    )
    codec: str = flag(
        "--activation-codec",
        "off",
        "int8: what replay does not compute again is kept and moved in 8 bits a value, each off "
        "by at most 1/253 of the largest of its 128 neighbours. int4: in 4 bits, off by at most "
        "1/6.9, rounded up or down so that the mean is right; sums in 8 bits as well. The losses "
        "of a step are the same, bit for bit; its gradients are approximate. Log-probabilities, "
        "masks, inputs and what losses save stay exact. With auto a plan chooses which layers "
        "keep exact bytes.",
        choices=("off", "int8", "int4"),
    )
    chunked_loss: str | int = flag(
        "--activation-chunked-loss",
        "off",
        "compute output projection and cross entropy over chunks of so many tokens, so that the "
        "logits are never in memory together; backward computes them again. auto: chunks of a size "
        "that suits the device. Works with every --activation-offload, off too. Not bit-identical: "
        "chunks change the order of a sum, within its rounding.",
        parse=count_or_word("tokens"),
        metavar="{off,auto,TOKENS}",
    )
    tiled_mlp: str | int = flag(
        "--activation-tiled-mlp",
        "off",
        "run each MLP over tiles of so many tokens. It saves its input only, and its wide tensors "
        "are in memory for one tile at a time; backward runs a tile again, takes its gradients and "
        "goes on to the next. auto: tiles of as many tokens as a token has values, 1024 at least. "
        "In Python norms that a model writes itself run over tiles too. Experts are left alone. "
        "Works with every --activation-offload, off too. Not bit-identical where there is more "
        "than one tile: the sums of gradients have another order.",
        parse=count_or_word("tokens"),
        metavar="{off,auto,TOKENS}",
    )
    verify: str = flag(
        "--activation-offload-verify",
        "off",
        "checksum: keep a checksum of everything written to an SSD and compare it when it is read; "
        "other bytes end the training with an error. off: trust the drive.",
        choices=("off", "checksum"),
    )
    drive_endurance_bytes: int | None = tier_flag(
        "--activation-offload-drive-tbw",
        "bytes that each SSD is rated to endure, as its data sheet says (TBW), for example 1200TB. "
        "The summary then says how long it lasts at this run's pace; under a year is a warning.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_recomputation()
        asks = f"--activation-recompute-input {self.recompute_input}"
        if self.boundary in ON_SSD:
            asks = f"--activation-boundary {self.boundary}"
        if self.mode in ON_SSD:
            asks = f"--activation-offload {self.mode}"
        self.check_directories(asks)
        self._check_planning()
        if self.mode == "keep" and self.replay == self.codec == "off":
            raise ConfigurationError(
                "--activation-offload keep moves nothing, and without replay or a codec it spares "
                "nothing either; drop --activation-replay off, or give --activation-offload off"
            )
        if self.replay == "on" and not self.enabled:
            raise ConfigurationError(
                "--activation-replay on is for what layers save, and --activation-offload off "
                "leaves all of that to autograd; give keep, ssd, host, tiered or auto instead"
            )
        self._check_codec()
        if self.io == "gds" and self.verify == "checksum":
            raise ConfigurationError(
                "--activation-offload-verify checksum reads every byte in host memory, where "
                "--activation-offload-io gds never has it; drop one of the two"
            )
        for name, file in (
            ("--activation-offload-trace", self.trace_file),
            ("--activation-memory-report", self.memory_report_file),
        ):
            if file is not None and not self.enabled:
                raise ConfigurationError(
                    f"{name} shows what offload does; give --activation-offload ssd, host, tiered "
                    "or auto as well"
                )
        both = (self.offload_layers or LayerSet()).overlap(self.recompute_layers or LayerSet())
        if both is not None:
            raise ConfigurationError(
                f"--activation-offload-layers and --activation-recompute-layers both name {both}; "
                "take it out of one of them"
            )
        if self.inflight_bytes is not None and self.inflight_bytes < self.min_bytes:
            raise ConfigurationError(
                f"--activation-offload-inflight ({format_size(self.inflight_bytes)}) is below "
                f"--activation-offload-min-bytes ({format_size(self.min_bytes)}), so nothing could "
                "ever be written; raise the former"
            )

    def _check_codec(self) -> None:
        if self.codec == "off":
            return
        if not self.enabled:
            raise ConfigurationError(
                f"--activation-codec {self.codec} is for what layers save, and "
                "--activation-offload off leaves all of that to autograd; give keep, ssd, host, "
                "tiered or auto instead"
            )

    def _check_recomputation(self) -> None:
        if self.recompute_layers is not None and not self.enabled:
            raise ConfigurationError(
                "--activation-recompute-layers needs --activation-offload ssd, host or tiered; "
                "without it use Megatron's own --recompute-method block"
            )
        if not self.enabled:
            self.check_recompute_input(
                "give both with --activation-offload ssd, host or tiered, or leave it out"
            )

    def check_recompute_input(self, advice: str) -> None:
        """Makes sure that there are recomputed layers whose inputs `recompute_input` is for.

        Args:
            advice: what to do, the end of the sentence; it depends on what else could recompute.

        Raises:
            ConfigurationError: neither a plan nor `recompute_layers` chooses any.
        """
        is_heard = self.plans or self.recompute_layers is not None
        if self.recompute_input is not None and not is_heard:
            raise ConfigurationError(
                f"--activation-recompute-input {self.recompute_input} is for the layers that "
                f"--activation-recompute-layers names; {advice}"
            )

    def _check_planning(self) -> None:
        for name, value in (
            ("--activation-memory-budget", self.memory_budget_bytes),
            ("--activation-offload-max-slowdown", self.max_slowdown),
            ("--activation-offload-plan", self.plan_file),
        ):
            if value is not None and not self.plans:
                raise ConfigurationError(
                    f"{name} is for --activation-offload auto, which decides by it; got "
                    f"--activation-offload {self.mode}"
                )
        for name, layers in (
            ("--activation-offload-layers", self.offload_layers),
            ("--activation-recompute-layers", self.recompute_layers),
        ):
            if layers is not None and self.plans:
                raise ConfigurationError(
                    f"{name} chooses layers, and so does --activation-offload auto; drop one of "
                    "the two"
                )
        if self.plans and self.recompute_input not in (None, "keep"):
            raise ConfigurationError(
                f"--activation-recompute-input {self.recompute_input} chooses where inputs wait, "
                "and so does --activation-offload auto; leave it out, or give keep: they stay"
            )
        if self.boundary != "keep" and (self.plans or not self.enabled):
            raise ConfigurationError(
                f"--activation-boundary {self.boundary} needs --activation-offload ssd, host or "
                f"tiered, got {self.mode}; give one of them, or --activation-boundary keep"
            )
        if self.memory_budget_bytes == 0:
            raise ConfigurationError(
                "--activation-memory-budget is less than a byte, which leaves no memory to compute "
                "in; give a size, for example 12GiB, or --activation-offload-max-slowdown for as "
                "little memory as possible"
            )

    @property
    def plans(self) -> bool:
        """Whether placements are decided by measuring and planning."""
        return self.mode == "auto"

    @property
    def safe_mode(self) -> str:
        """Where everything goes while nothing is planned: `ssd`, `host` or `tiered`."""
        if not self.plans:
            return self.mode
        return "tiered" if self.uses_ssd and self.uses_host else "ssd" if self.uses_ssd else "host"

    @property
    def chunks_loss(self) -> bool:
        """Whether output projection and loss are computed over chunks of tokens."""
        return self.chunked_loss != "off"

    @property
    def chunk_tokens(self) -> int | None:
        """Most tokens of such a chunk; None: as many as suit the device."""
        return self.chunked_loss if isinstance(self.chunked_loss, int) else None

    @property
    def tiles_mlps(self) -> bool:
        """Whether MLPs run over tiles of tokens."""
        return self.tiled_mlp != "off"

    @property
    def tile_tokens(self) -> int | None:
        """Most tokens of such a tile; None: as many as suit the model."""
        return self.tiled_mlp if isinstance(self.tiled_mlp, int) else None

    @property
    def in_pieces(self) -> bool:
        """Whether the loss or MLPs are computed over some tokens at a time."""
        return self.chunks_loss or self.tiles_mlps

    @property
    def uses_ssd(self) -> bool:
        """Whether activations may go to an SSD."""
        if self.plans:
            return bool(self.directories)
        return not ON_SSD.isdisjoint((self.mode, self.recompute_input, self.boundary))

    @property
    def uses_host(self) -> bool:
        """Whether activations may go to host memory."""
        if self.plans:
            return not self.directories or self.host_budget is not None
        return not ON_HOST.isdisjoint((self.mode, self.recompute_input, self.boundary))
