# SPDX-License-Identifier: Apache-2.0
"""`megatron-offload estimate`: bytes counted without a device, against hand counts and real steps.

Models are small ones of transformers with their default settings.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.offload import cli, offload_activations, offload_optimizer
from megatron.offload.commands.estimate.hardware import RESERVED_BYTES, Memory
from megatron.offload.commands.estimate.live_bytes import Kind, LiveBytes
from megatron.offload.commands.estimate.ways import (
    LIVE_UNITS,
    OPTIMIZER_STEP,
    WAYS,
    Training,
    need_of,
)
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration import tiled_mlps
from megatron.offload.planner.projection.hardware import GpuSpec
from megatron.offload.sizes import GIB, MIB

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron.offload.commands.estimate.model import Adapters, Architecture  # noqa: E402
from megatron.offload.commands.estimate.step import (  # noqa: E402
    HEAD,
    PLAIN,
    Pass,
    StepBytes,
    step_bytes,
)

IS_VERSION_4 = transformers.__version__.startswith("4.")
BATCH, SEQUENCE, HIDDEN, WORDS, HEADS = 2, 64, 64, 96, 4
SMALL = 256  # bytes, below which nothing moves or is replayed in these tests


def config_of(name: str, num_layers: int = 2) -> Any:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": num_layers, "vocab_size": WORDS}
    sizes |= {"num_attention_heads": HEADS, "intermediate_size": 128}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        return transformers.GPT2Config(
            n_layer=num_layers,
            n_embd=HIDDEN,
            n_head=HEADS,
            n_positions=SEQUENCE,
            vocab_size=WORDS,
            **tokens,
        )
    if name == "mixtral":
        if IS_VERSION_4:
            pytest.skip("its experts look for the tokens that they get, which needs values")
        return transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)
    return transformers.LlamaConfig(**sizes, **tokens)


def architecture_of(name: str, num_layers: int = 2, dtype: str = "fp32") -> Architecture:
    if name == "llama-lora":
        pytest.importorskip("peft", reason="peft is not installed")
    adapters = Adapters(8) if name == "llama-lora" else None
    return Architecture(config_of(name, num_layers), dtype, adapters)


def real_model(name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).train()
    if name == "llama-lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8))
    return model


def saved_bytes(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """What autograd holds of a real forward pass, each storage once, but parameters and inputs."""
    own = [*model.parameters(), *model.buffers(), *inputs.values()]
    stationary = {one.untyped_storage()._cdata for one in own}
    saved: dict[int, torch.UntypedStorage] = {}  # alive, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_parameter = isinstance(tensor._base, torch.nn.Parameter)
        if storage._cdata not in stationary and not is_parameter:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = model(**inputs).loss
    num_bytes = sum(one.nbytes() for one in saved.values())
    loss.backward()
    return num_bytes


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


MODELS = ("llama", "gpt2", "mixtral", "llama-lora")


# -- Bytes of a step ------------------------------------------------------------------------------


def test_what_lives_is_counted_by_hand() -> None:
    live = LiveBytes()
    held = torch.empty(100, device="meta")
    live.add(held, Kind.PARAMETERS)
    with live:
        live.phase = "one"
        first = held + 1
        second = first * 2
        view = second[:10]
        del first
        live.phase = "two"
        del second  # the view holds it
    assert live.now == {Kind.PARAMETERS: 400, Kind.WORKING: 400}
    assert live.peaks["one"].total() == 1200 and live.peaks["two"].total() == 800
    live.change_kind(view, Kind.SAVED)
    del view
    assert live.now.total() == 400 and live.now[Kind.SAVED] == 0


def test_parameters_of_a_llama_are_those_that_one_counts() -> None:
    found = step_bytes(architecture_of("llama", dtype="bf16"), BATCH, SEQUENCE)
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 128 + 2 * HIDDEN
    assert found.largest_layer == 2 * layer and found.of_layers == 2 * 2 * layer
    assert found.parameters == 2 * (2 * layer + 2 * WORDS * HIDDEN + HIDDEN) == found.trained
    assert found.largest_trained == 2 * HIDDEN * 128


@pytest.mark.parametrize("name", MODELS)
def test_autograd_saves_what_is_said_to_the_byte(name: str) -> None:
    torch.manual_seed(0)
    found = step_bytes(architecture_of(name), BATCH, SEQUENCE, on_cpu=True)
    model = real_model(name)
    assert found.kept == saved_bytes(model, tokens()) > 100_000
    if not IS_VERSION_4:  # which then makes a mask
        model.config.use_cache = False  # as the Trainer sets it; the model's own default was above
        assert found.kept == saved_bytes(model, tokens())


@pytest.mark.parametrize("name", MODELS)
def test_what_replay_computes_again_is_said_to_the_byte(name: str) -> None:
    torch.manual_seed(0)
    model = real_model(name)
    with offload_activations(model, mode="keep", min_bytes=SMALL) as handle:
        for _ in range(2):
            model(**tokens()).loss.backward()
        ran = handle.statistics["replayed_bytes"]
    architecture = architecture_of(name)
    found = step_bytes(architecture, BATCH, SEQUENCE, Pass("replay"), min_bytes=SMALL, on_cpu=True)
    assert found.replayed == ran > 0
    moved = step_bytes(architecture, BATCH, SEQUENCE, Pass("move"), min_bytes=SMALL, on_cpu=True)
    assert moved.replayed == ran and 0 < moved.moved < found.kept + 1


def test_a_model_may_ask_for_autocast_and_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of transformers 4 do; the meta device has neither."""
    expected = step_bytes(architecture_of("llama"), BATCH, SEQUENCE)
    kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    plain, autocast = kind.forward, torch.autocast

    def asks(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        assert 0 not in position_ids
        with torch.autocast(device_type=x.device.type, enabled=False):
            return plain(self, x, position_ids)

    monkeypatch.setattr(kind, "forward", asks)
    found = step_bytes(architecture_of("llama"), BATCH, SEQUENCE)
    assert found.kept == expected.kept and found.peaks == expected.peaks
    assert torch.autocast is autocast


def test_a_gpu_saves_masks_where_a_cpu_saves_noise() -> None:
    of_cpu = step_bytes(architecture_of("gpt2"), BATCH, SEQUENCE, on_cpu=True)
    of_gpu = step_bytes(architecture_of("gpt2"), BATCH, SEQUENCE)
    scores = BATCH * HEADS * SEQUENCE * SEQUENCE * 4
    # Two layers with two dropouts of hidden states each, and one behind the embedding.
    assert of_cpu.kept - of_gpu.kept > 5 * BATCH * SEQUENCE * HIDDEN * 3 + 2 * scores


@pytest.mark.parametrize("how", [PLAIN, Pass("move"), Pass("replay", checkpoints=True)])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_two_short_models_say_all_of_a_long_one(name: str, how: Pass) -> None:
    architecture = architecture_of(name, num_layers=9)
    assert architecture.layers_are_alike
    short = step_bytes(architecture, BATCH, SEQUENCE, how, min_bytes=SMALL)
    whole = step_bytes(architecture, BATCH, SEQUENCE, how, min_bytes=SMALL, whole=True)
    assert short.parameters == whole.parameters and short.kept == whole.kept
    assert (short.moved, short.replayed, short.layers) == (whole.moved, whole.replayed, 9)
    assert sum(short.peak()[1].values()) == sum(whole.peak()[1].values())


def test_layers_that_differ_are_all_made() -> None:
    config = transformers.Gemma3TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=6,
        vocab_size=WORDS,
        intermediate_size=128,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    architecture = Architecture(config, "fp32")
    assert architecture.num_layers == 6 and not architecture.layers_are_alike
    assert step_bytes(architecture, BATCH, SEQUENCE).layers == 6


def test_checkpointing_and_a_chunked_loss_take_less() -> None:
    architecture = architecture_of("llama")
    plain = step_bytes(architecture, BATCH, SEQUENCE)
    again = step_bytes(architecture, BATCH, SEQUENCE, Pass(checkpoints=True))
    chunked = step_bytes(architecture, BATCH, SEQUENCE, Pass(chunks_loss=True))
    assert again.kept < plain.kept / 2 and chunked.kept < plain.kept


@pytest.mark.parametrize("how", ["plain", "checkpoints", "accumulates"])
def test_the_peak_is_that_of_a_real_step(how: str) -> None:
    """What torch's profiler says of its allocator: workspaces of operations count there too."""
    torch.manual_seed(0)
    checkpoints, accumulates = how == "checkpoints", how == "accumulates"
    model, inputs = real_model("llama"), tokens()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # as version 5 does by itself
    model(**inputs).loss.backward()
    if not accumulates:
        model.zero_grad()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        model(**inputs).loss.backward()
    taken = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    found = step_bytes(
        architecture_of("llama"),
        BATCH,
        SEQUENCE,
        Pass(checkpoints=checkpoints),
        on_cpu=True,
        accumulates=accumulates,
    )
    own = found.parameters + found.buffers + sum(one.nbytes for one in inputs.values()) / 2
    own += found.trained if accumulates else 0.0
    said = sum(found.peak()[1].values()) - own
    assert said == pytest.approx(most, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(IS_VERSION_4, reason="checkpointed, it makes a mask of all pairs of tokens")
def test_what_is_left_of_a_long_sequence_is_a_tile_and_some_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of docs/long-sequences.md: of a norm's backward nothing has all tokens."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
    )
    tokens, how = 65536, Pass("move", checkpoints=True, chunks_loss=True, tiles_mlps=True)
    found = step_bytes(Architecture(config), 1, tokens, how, accumulates=True)
    hidden = tokens * 4096 * 2
    # Queries, keys, values, the result, logarithms of sums; cosines and sines; tokens, positions.
    attention = 2 * hidden + 2 * hidden // 4 + tokens * (32 * 4 + 2 * 128 * 2 + 2 * 8)
    wide = 4096 * 14336  # of a tile, and of a weight
    tile = 3 * wide * 4 + 10 * wide * 2 + 4096 * 4096 * 2
    activations = sum(found.peak()[1].values()) - found.parameters - found.trained
    few = 1024  # frequencies of the positions, the loss
    assert 6.5 * GIB < activations <= 2 * hidden + attention + 5 * hidden + tile + few
    monkeypatch.setattr(tiled_mlps, "_norms", lambda model: iter(()))  # MLPs alone
    alone = step_bytes(Architecture(config), 1, tokens, how, accumulates=True)
    in_fp32 = 7 * 2 * hidden  # in a norm's backward; neither a tile nor three hidden states
    more = in_fp32 - tile - 3 * hidden
    assert sum(alone.peak()[1].values()) - sum(found.peak()[1].values()) == pytest.approx(
        more, rel=0.02
    )


# -- Ways -----------------------------------------------------------------------------------------


def step_by_hand(moved: float = 0.0) -> StepBytes:
    """A model of 1,000 bytes, of which 800 are in four layers."""
    peaks = {
        "head": {Kind.PARAMETERS: 1000.0, Kind.SAVED: 300.0, Kind.LOSS: 100.0},
        "backward": {Kind.PARAMETERS: 1000.0, Kind.GRADIENTS: 900.0, Kind.WORKING: 20.0},
    }
    return StepBytes(
        parameters=1000.0,
        trained=1000.0,
        trained_sizes=(100, *(150, 50) * 4, 100),
        of_layers=800.0,
        largest_layer=200.0,
        trained_of_layers=800.0,
        trained_of_layer=200.0,
        layers=4,
        kept=300.0,
        moved=moved,
        peaks=peaks,
    )


def test_in_plain_pytorch_all_is_in_device_memory() -> None:
    need = need_of(WAYS["plain"], step_by_hand(), Training(on_cpu=True))
    assert need.phase == OPTIMIZER_STEP  # weights, gradients, two states, two temporaries
    assert need.device == 1000 + 1000 + 2000 + 2 * 150
    assert need.host == need.ssd == need.written == 0
    assert need_of(WAYS["plain"], step_by_hand(), Training()).device == 4000
    sgd = need_of(WAYS["plain"], step_by_hand(), Training(optimizer="sgd"))
    assert sgd.device == 2000 and sgd.kinds[Kind.STATES] == 0


def test_what_moves_is_on_its_tier() -> None:
    training = Training(window_bytes=500, bucket_bytes=100)
    need = need_of(WAYS["parameters"], step_by_hand(40.0), training)
    # Two layers and one that is written, all gradients, and three buckets in a row, each as large
    # as the states of a parameter.
    assert need.phase == OPTIMIZER_STEP
    assert need.device == 200 + (LIVE_UNITS + 1) * 200 + 1000 + 300 + 100 + 300
    assert need.ssd == 40 + (2000 - 500) + 800
    assert need.written == 40 + (2000 - 500) + 800 and need.host == 500 + 40
    assert need.read == need.written + 2 * 800
    on_host = need_of(WAYS["parameters"], step_by_hand(40.0), Training(tier="host"))
    assert on_host.host == 2840 and on_host.ssd == 0
    small = Training(window_bytes=500, bucket_bytes=10)
    of_many = dataclasses.replace(step_by_hand(40.0), trained_sizes=(1,) * 1000)
    of_many.peaks["backward"][Kind.WORKING] = 300.0
    last = need_of(WAYS["gradients"], of_many, small)
    # 200 bytes outside of layers and two layers; half of what moves is on its way.
    assert last.phase == "backward" and last.device == 2 * (200 + 2 * 200) + 300 + 20
    assert last.ssd == need.ssd + 800


def test_micro_batches_write_activations_and_read_parameters_so_many_times() -> None:
    once = need_of(WAYS["parameters"], step_by_hand(40.0), Training())
    four = need_of(WAYS["parameters"], step_by_hand(40.0), Training(micro_batches=4))
    assert four.written == once.written + 3 * 40
    assert four.read == once.read + 3 * (40 + 2 * 800)
    one, several = (
        need_of(WAYS["gradients"], step_by_hand(40.0), Training(micro_batches=number))
        for number in (1, 4)
    )
    assert several.read == one.read + 3 * 40  # a layer-major step reads parameters twice


@pytest.mark.slow
def test_gradients_of_an_earlier_micro_batch_are_there_all_along(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for number in ("1", "2"):
        path = folder / f"{number}.json"
        flags = [
            "--sequence",
            "2048",
            "--batch",
            "2",
            "--micro-batches",
            number,
            "--json",
            str(path),
        ]
        assert cli.main(["estimate", str(folder), *flags]) == 0
        found.append(json.loads(path.read_text()))
    assert "2 micro-batches of 2 x 2048 tokens" in capsys.readouterr().out
    one, two = (each["ways"]["plain"] for each in found)
    assert one["peak_in"] == two["peak_in"] == "output layer and loss"
    assert two["device_bytes"] == one["device_bytes"] + found[0]["trained_bytes"]
    assert found[1]["settings"]["micro_batches"] == 2


def test_states_on_an_ssd_leave_three_buckets_or_on_a_cpu_a_window() -> None:
    step = step_by_hand()
    step.peaks = {}
    of_gpu = Training(window_bytes=600, bucket_bytes=100)
    assert need_of(WAYS["states"], step, of_gpu).kinds[Kind.STATES] == 300 + 100 + 300
    on_cpu = need_of(WAYS["states"], step, dataclasses.replace(of_gpu, on_cpu=True))
    assert on_cpu.kinds[Kind.STATES] == 600
    # A parameter is updated as a whole, with two temporaries of its size.
    assert on_cpu.kinds[Kind.WORKING] == 2 * 150
    tiny = need_of(WAYS["states"], step, Training(on_cpu=True, window_bytes=10, bucket_bytes=10))
    assert tiny.kinds[Kind.STATES] == 300  # one bucket has room always


@pytest.mark.parametrize(
    ("phase", "of_cpu", "of_gpu"),
    [("output layer and loss", 700, 0), ("backward of layer 1", 1000, 700)],
)
def test_states_fill_their_room_from_the_middle_of_backward_on(
    phase: str, of_cpu: int, of_gpu: int
) -> None:
    """Before it a CPU has what stays of a window: all but room for the largest bucket."""
    step = step_by_hand()
    step.peaks = {phase: {Kind.SAVED: 10_000.0}}  # more than the optimizer's step takes
    settings = Training(window_bytes=1000, bucket_bytes=100)
    # Buckets of 200, 300, 100, ... and 200 bytes: the last four, or the first five; a
    # GPU has the last four of at most 700.
    assert need_of(WAYS["states"], step, settings).kinds[Kind.STATES] == of_gpu
    on_cpu = need_of(WAYS["states"], step, dataclasses.replace(settings, on_cpu=True))
    assert on_cpu.kinds[Kind.STATES] == of_cpu
    assert on_cpu.ssd == on_cpu.written == 2000 - 700
    later = dataclasses.replace(settings, on_cpu=True, micro_batches=2)  # read in the first one
    assert need_of(WAYS["states"], step, later).kinds[Kind.STATES] == 1000


def test_states_are_in_memory_when_it_is_said_that_they_are(tmp_path: Path) -> None:
    """In a real training on this CPU: at the loss, and when all gradients are there."""
    torch.manual_seed(0)
    window_bytes, bucket_bytes = 300_000, 40_000
    model = real_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, list[int]] = {HEAD: [], "backward of layer 1": []}
    with offload_optimizer(
        optimizer, tmp_path, window_bytes=window_bytes, bucket_bytes=bucket_bytes
    ) as handle:
        assert handle.states is not None
        for _ in range(4):
            loss = model(**tokens()).loss
            handle.states.wait_for_writes()
            found[HEAD].append(handle.states.memory_bytes)
            loss.backward()
            found["backward of layer 1"].append(handle.states.memory_bytes)
            optimizer.step()
            optimizer.zero_grad()
    step = step_bytes(architecture_of("llama"), BATCH, SEQUENCE, on_cpu=True)
    training = Training(on_cpu=True, window_bytes=window_bytes, bucket_bytes=bucket_bytes)
    said = {}
    for phase, sizes in found.items():
        peaks = {phase: {Kind.SAVED: 1e9}}  # the peak is there
        need = need_of(WAYS["states"], dataclasses.replace(step, peaks=peaks), training)
        said[phase] = need.kinds[Kind.STATES]
        # Two steps in each direction; each parameter has a number of steps beside its states.
        assert said[phase] == pytest.approx(max(sizes[1:]), rel=0.02)
    assert said[HEAD] < 0.8 * window_bytes < said["backward of layer 1"] <= window_bytes


def test_gpus_share_all_but_the_layer_that_computes() -> None:
    need = need_of(WAYS["plain"], step_by_hand(), Training(gpus=4))
    assert need.phase == "backward"
    assert need.kinds[Kind.PARAMETERS] == 250 + 2 * 200
    assert need.kinds[Kind.GRADIENTS] == 900 / 4 + 200 and need.kinds[Kind.STATES] == 500


# -- Hardware -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_a_driver_names_the_card(driver: str, name: str) -> None:
    size = int(GpuSpec.load(name).memory_bytes)
    found = GpuSpec.of_device(driver, size)
    assert found is not None and found.name == name
    assert GpuSpec.of_device("NVIDIA GeForce RTX 2060", size) is None


def test_hardware_is_described_by_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text('{"title": "mine", "memory_bytes": "12GB"}')
    found = Memory.of(str(path))
    assert found.title == "mine" and found.device_bytes == 12 * 10**9
    assert found.fits(12 * 10**9 - RESERVED_BYTES) and not found.fits(12 * 10**9)
    path.write_text('{"title": "mine"}')
    with pytest.raises(ConfigurationError, match=r"memory_bytes.*missing.*; write for"):
        Memory.of(str(path))


# -- The command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config_of("llama", num_layers=8).save_pretrained(tmp_path)
    return tmp_path


def test_the_tables_are_within_100_columns_and_the_file_has_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "estimate.json"
    flags = ["--sequence", "128", "--hardware", "rtx-4090", "--json", str(path)]
    assert cli.main(["estimate", str(folder), *flags]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "It fits as it is" in text and "RTX 4090" in text
    values = json.loads(path.read_text())
    assert values["schema"] == "megatron-offload estimate" and values["version"]
    assert set(values["ways"]) == set(WAYS) and values["layers"] == 8
    plain = values["ways"]["plain"]
    assert plain["fits"] and plain["device_bytes"] >= 4 * values["parameter_bytes"]
    assert plain["device_bytes"] == sum(plain["device_bytes_by_kind"].values())


def test_gpus_that_share_a_model_have_no_way_that_fsdp_does_not_take(folder: Path) -> None:
    path = folder / "estimate.json"
    flags = ["--sequence", "128", "--gpus", "8", "--json", str(path)]
    assert cli.main(["estimate", str(folder), *flags]) == 0
    values = json.loads(path.read_text())
    moved = {name for name, way in WAYS.items() if way.parameters_move}
    assert moved and set(values["left_out"]) == moved and set(values["ways"]) == set(WAYS) - moved


def test_what_fits_nowhere_says_what_to_try(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    card = tmp_path / "small.json"
    card.write_text(json.dumps({"memory_bytes": GIB + MIB}))
    flags = ["--sequence", "4096", "--hardware", str(card)]
    assert cli.main(["estimate", str(folder), *flags]) == 1
    text = capsys.readouterr().out
    assert "No way fits" in text and "--sequence below 4096" in text and "--lora 16" in text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["/no/such/folder"], "there is no /no/such/folder; give the config.json"),
        (["{folder}", "--hardware", "rtx-1"], "neither a GPU that is described nor a .json file"),
        (["{folder}", "--lora-targets", "q_proj"], "--lora-targets is of use with --lora"),
        (["{folder}", "--gpus", "2", "--hardware", "cpu"], "drop it, or --hardware cpu"),
        (["{folder}", "--to", "host", "--hardware", "cpu"], "--to host frees nothing on a CPU"),
        (["{folder}/bart"], "has an encoder and a decoder"),
        (["{folder}/typed"], "is no configuration of a model"),
        (["{folder}/heads"], "makes no model of this configuration"),
    ],
)
def test_what_is_not_known_is_a_sentence(
    flags: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.BartConfig(encoder_layers=1, decoder_layers=1).save_pretrained(folder / "bart")
    wrong = {"typed": {"model_type": "llama", "hidden_size": "wide"}}
    wrong["heads"] = {"model_type": "gpt2", "n_embd": 10, "n_head": 3, "n_layer": 2}
    for name, values in wrong.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    words = [one.replace("{folder}", str(folder)) for one in flags]
    assert cli.main(["estimate", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_model_with_another_loss_has_no_chunked_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=128,
        vocab_size=WORDS,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path)
    path = tmp_path / "estimate.json"
    assert cli.main(["estimate", str(tmp_path), "--sequence", "64", "--json", str(path)]) == 0
    values = json.loads(path.read_text())
    assert set(values["left_out"]) == {"chunked", "least", "tiled"} and "plain" in values["ways"]
    assert "causal language models" in values["left_out"]["chunked"]
    assert values["hardware"] is None and "--hardware" in capsys.readouterr().out
