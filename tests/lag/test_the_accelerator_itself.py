# SPDX-License-Identifier: Apache-2.0
"""The test accelerator computes a CPU's bits, waits for nothing by itself and shows missing waits.

What other tests prove with it stands on this. Streams are held and not slowed down wherever an
order is shown; a time is compared with another one of the same run, and never with a clock.
"""

from __future__ import annotations

import copy
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.lag.module import LagModule
from tests.support.waiting import wait_until

POISON = 0xDB
NUM = 1000


def train(model: torch.nn.Module, x: torch.Tensor, num_steps: int = 3) -> torch.Tensor:
    """AdamW steps; their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3)


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.cpu().view(torch.uint8) == POISON).all())


@pytest.mark.parametrize("delay_us", [0, 200])
def test_training_gives_the_bits_of_a_cpu(lag: LagModule, delay_us: int) -> None:
    on_cpu, x = encoder(), torch.randn(4, 33, 64)
    on_lag = copy.deepcopy(on_cpu).to("lag")
    with sdpa_kernel(SDPBackend.MATH):
        expected = train(on_cpu, x)
        lag.set_delays(delay_us, delay_us)
        assert torch.equal(train(on_lag, x.to("lag")).cpu(), expected)
    for ours, theirs in zip(on_lag.parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_training_is_queued_whole_before_any_of_it_runs(lag: LagModule) -> None:
    model, x = encoder().to("lag"), torch.randn(2, 5, 64).to("lag")
    # The engine's threads start, and warm up what is made once.
    train(model, x, 1)
    lag.synchronize()
    before, stream = lag.counters(), lag.current_stream()
    with lag.held(stream):
        train(model, x)
        after = lag.counters()
        assert not stream.query()
    assert after["kernels"] - before["kernels"] > 500
    for name in ("host_waits", "operations_that_waited", "copies_to_host"):
        assert after[name] == before[name], name


def test_what_depends_on_data_waits_and_is_counted(lag: LagModule) -> None:
    mask = torch.tensor([0, 1, 1, 0]).to("lag")
    before = lag.counters()["operations_that_waited"]
    assert torch.nonzero(mask).cpu().tolist() == [[1], [2]]
    assert mask.sum().item() == 2
    assert lag.counters()["operations_that_waited"] == before + 2
    assert lag.host_waits_by_thread()[threading.get_native_id()] > 0


def test_equal_seeds_give_equal_numbers_however_late_kernels_run(lag: LagModule) -> None:
    torch.manual_seed(1)
    first = [torch.rand(8, device="lag") for _ in range(3)]
    lag.set_delays(500, 0)
    torch.manual_seed(1)
    second = [torch.rand(8, device="lag") for _ in range(3)]
    assert torch.equal(torch.stack(first).cpu(), torch.stack(second).cpu())
    assert not torch.equal(first[0].cpu(), first[1].cpu())


def test_recurrent_cells_compute_what_a_cpu_does(lag: LagModule) -> None:
    torch.manual_seed(2)
    for kind in (torch.nn.LSTM, torch.nn.GRU):
        on_cpu, x = kind(3, 5, 2), torch.randn(7, 2, 3)
        on_lag = copy.deepcopy(on_cpu).to("lag")
        expected, result = on_cpu(x)[0], on_lag(x.to("lag"))[0]
        expected.square().sum().backward()
        result.square().sum().backward()
        torch.testing.assert_close(result.cpu(), expected)
        for ours, theirs in zip(on_lag.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_indices_may_be_on_the_host(lag: LagModule) -> None:
    rows = torch.arange(4.0).to("lag")
    assert rows[torch.tensor([True, False, True, False])].cpu().tolist() == [0.0, 2.0]
    assert rows[torch.tensor([3, 1])].cpu().tolist() == [3.0, 1.0]
    with pytest.raises(RuntimeError, match="same device"):
        rows + torch.ones(4)


# -- Streams and events ---------------------------------------------------------------------------


def test_a_thread_is_on_the_stream_that_it_chose_and_on_no_other(lag: LagModule) -> None:
    main, side = lag.current_stream(), lag.Stream("lag")
    seen = []
    with lag.stream(side):
        assert lag.current_stream() == side == torch.accelerator.current_stream()
        thread = threading.Thread(target=lambda: seen.append(lag.current_stream()))
        thread.start()
        thread.join(10)
    assert lag.current_stream() == main == lag.default_stream()
    assert seen == [main]


def test_events_come_when_what_was_queued_before_has_run(lag: LagModule) -> None:
    stream = lag.current_stream()
    begin, end = (torch.Event("lag", enable_timing=True) for _ in range(2))
    assert begin.query()  # never recorded
    with lag.held(stream):
        begin.record()
        lag.sleep(0.01)
        end.record()
        assert not begin.query() and not end.query() and not stream.query()
    end.synchronize()
    assert begin.query() and end.query()
    assert begin.elapsed_time(end) >= 10
    without = stream.record_event()
    without.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        without.elapsed_time(end)


@pytest.mark.parametrize("how", ["stream", "event", "device", "cache", "number"])
def test_who_waits_lets_other_threads_run_python(lag: LagModule, how: str) -> None:
    stream, x = lag.current_stream(), torch.zeros(4, device="lag")
    event = torch.Event("lag")
    waits = {
        "stream": stream.synchronize,
        "event": event.synchronize,
        "device": torch.accelerator.synchronize,
        "cache": torch.accelerator.empty_cache,
        "number": lambda: x.sum().item(),
    }
    with lag.held(stream):
        event.record(stream)
        thread = threading.Thread(target=waits[how])
        thread.start()
        wait_until(lambda: thread.native_id in lag.host_waits_by_thread(), "nobody waits")
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_does_not_wait_for_its_source_gets_other_bytes(
    lag: LagModule, waits: bool
) -> None:
    main, side = lag.current_stream(), lag.Stream("lag")
    host = torch.empty(NUM, pin_memory=True)
    with lag.held(main):
        source = torch.arange(float(NUM), device="lag")
        made = main.record_event()
        with lag.stream(side):
            if waits:
                side.wait_event(made)
            host.copy_(source, non_blocking=True)
            copied = side.record_event()
        if not waits:
            copied.synchronize()
    copied.synchronize()
    assert torch.equal(host, torch.arange(float(NUM))) == waits
    assert poisoned(host) == (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_does_not_wait_for_its_targets_former_user_is_overwritten(
    lag: LagModule, waits: bool
) -> None:
    main, side = lag.current_stream(), lag.Stream("lag")
    source = torch.full((NUM,), 3.0).pin_memory()
    former = torch.empty(NUM, device="lag")
    address = former.data_ptr()
    with lag.held(main):
        former.fill_(1.0)
        del former
        target = torch.empty(NUM, device="lag")
        assert target.data_ptr() == address
        free = main.record_event()
        with lag.stream(side):
            if waits:
                side.wait_event(free)
            target.copy_(source, non_blocking=True)
            copied = side.record_event()
        if not waits:
            copied.synchronize()
    copied.synchronize()
    main.synchronize()
    assert torch.equal(target.cpu(), source) == waits
    assert poisoned(target) == (not waits)


# -- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_uses_is_reused_unless_that_is_recorded(
    lag: LagModule, recorded: bool
) -> None:
    main, side = lag.current_stream(), lag.Stream("lag")
    shared = torch.full((NUM,), 5.0, device="lag")
    lag.synchronize()
    address = shared.data_ptr()
    with lag.held(side):
        with lag.stream(side):
            double = shared * 2
        if recorded:
            shared.record_stream(side)
        del shared
        others = torch.full((NUM,), 9.0, device="lag")
        assert (others.data_ptr() == address) == (not recorded)
        main.synchronize()
    side.synchronize()
    assert double.cpu().tolist() == [10.0 if recorded else 18.0] * NUM


def test_freed_memory_is_poisoned_when_its_stream_comes_to_it(lag: LagModule) -> None:
    freed = torch.full((NUM,), 5.0, device="lag")
    view = torch.empty(0, device="lag")
    address = freed.data_ptr()
    with lag.held(lag.current_stream()):
        del freed
        again = torch.empty(NUM, device="lag")
    assert again.data_ptr() == address
    assert poisoned(again)
    assert poisoned(torch.empty(8 << 20, device="lag"))  # memory that was never used
    lag.set_poison(False)
    kept = torch.full((NUM,), 6.0, device="lag")
    del kept
    assert torch.empty(NUM, device="lag").cpu().tolist() == [6.0] * NUM
    assert view.numel() == 0


def test_memory_is_counted_as_cuda_counts_it(lag: LagModule) -> None:
    lag.synchronize()
    lag.empty_cache()
    lag.reset_peak_memory_stats()
    before, free_before = lag.memory_allocated(), lag.mem_get_info()[0]
    tensors = [torch.empty(1 << 20, dtype=torch.uint8, device="lag") for _ in range(4)]
    assert lag.memory_allocated() == torch.accelerator.memory_allocated() == before + (4 << 20)
    reserved = lag.memory_reserved()
    del tensors
    assert lag.memory_allocated() == before
    assert lag.max_memory_allocated() == before + (4 << 20)
    stats = lag.memory_stats()
    assert stats["allocated_bytes.all.peak"] == lag.max_memory_allocated()
    assert stats == {
        **{
            f"{name}.all.{kind}": count
            for name, of in lag.memory_stats_as_nested_dict().items()
            if isinstance(of, dict)
            for kind, count in of["all"].items()
        },
        **{name: n for name, n in stats.items() if "." not in name},
    }
    assert lag.memory_reserved() == reserved  # kept for reuse ...
    lag.empty_cache()
    assert lag.mem_get_info()[0] == free_before  # ... until it is given back
    lag.reset_peak_memory_stats()
    assert lag.max_memory_allocated() == before


def test_what_is_reserved_does_not_depend_on_what_was_freed_before(lag: LagModule) -> None:
    lag.empty_cache()
    before = lag.memory_reserved()
    for _ in range(2):  # then its memory and that beside it are one
        large = torch.empty(64 << 20, dtype=torch.uint8, device="lag")
        place = large.data_ptr()
        del large
        lag.empty_cache()
    small = torch.empty(1 << 20, dtype=torch.uint8, device="lag")
    assert lag.memory_reserved() - before <= 2 << 20
    del small
    lag.empty_cache()
    large = torch.empty(64 << 20, dtype=torch.uint8, device="lag")
    assert large.data_ptr() == place  # of which a part was taken
    assert lag.memory_reserved() - before == 64 << 20


def test_memory_ends_where_a_test_says(lag: LagModule) -> None:
    gc.collect()  # what other tests have left would make room later
    lag.synchronize()
    lag.empty_cache()
    lag.limit_memory(lag.memory_reserved() + (8 << 20))
    cached = torch.empty(6 << 20, dtype=torch.uint8, device="lag")
    with pytest.raises(torch.OutOfMemoryError, match="lag"):
        torch.empty(4 << 20, dtype=torch.uint8, device="lag")
    del cached
    with lag.stream(lag.Stream("lag")):  # what another stream kept is given back for it
        assert torch.empty(8 << 20, dtype=torch.uint8, device="lag").numel() == 8 << 20


def test_storages_are_emptied_filled_and_set(lag: LagModule) -> None:
    tensor = torch.arange(10.0).to("lag")
    storage, kept = tensor.untyped_storage(), tensor.cpu()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
    storage.resize_(num_bytes)
    tensor.copy_(kept)
    raw = torch.empty(0, dtype=torch.uint8, device="lag").set_(storage)
    assert raw.data_ptr() == tensor.data_ptr()
    assert torch.equal(raw.cpu().view(torch.float32), kept)


# -- Copies from and to the host ------------------------------------------------------------------


def test_copies_of_pinned_memory_return_at_once_and_others_hold_the_host(lag: LagModule) -> None:
    stream = lag.current_stream()
    on_device = torch.arange(50_000.0).to("lag")
    pinned, pageable = torch.empty(50_000).pin_memory(), torch.empty(50_000)
    assert pinned.is_pinned() and not pageable.is_pinned()
    with lag.held(stream):
        for target, source in ((pinned, on_device), (on_device, pinned)):
            target.copy_(source, non_blocking=True)
        assert not stream.query()
    for target, source in ((pageable, on_device), (on_device, pageable)):
        with lag.held(stream):
            thread = threading.Thread(target=target.copy_, args=(source, True))
            thread.start()
            number = thread.native_id
            wait_until(lambda: number in lag.host_waits_by_thread(), "nobody waits")  # noqa: B023
            assert thread.is_alive()
        thread.join(10)
        assert not thread.is_alive()
    assert torch.equal(pageable, torch.arange(50_000.0))


def test_registered_memory_counts_as_pinned(lag: LagModule) -> None:
    host = torch.empty(NUM, dtype=torch.uint8)
    lag.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    with pytest.raises(RuntimeError, match="registered already"):
        lag.host_register(host.data_ptr() + 10, 10)
    lag.host_unregister(host.data_ptr())
    assert not host.is_pinned()
    with pytest.raises(RuntimeError, match="not registered"):
        lag.host_unregister(host.data_ptr())


def test_pinned_memory_that_is_given_up_lives_until_its_copy_is_done(lag: LagModule) -> None:
    source = torch.full((NUM,), 4.0).pin_memory()
    target = torch.empty(NUM, device="lag")
    with lag.held(lag.current_stream()):
        target.copy_(source, non_blocking=True)
        del source
        others = [torch.full((NUM,), 8.0).pin_memory() for _ in range(8)]
    assert target.cpu().tolist() == [4.0] * NUM
    assert len(others) == 8


def test_bandwidth_and_sleep_hold_a_stream_and_not_the_host(lag: LagModule) -> None:
    side = lag.Stream("lag")
    pinned = torch.zeros(100_000, dtype=torch.uint8).pin_memory()
    on_device = pinned.to("lag")
    lag.set_bandwidth(to_host=5e6, from_host=10e6)
    events = [torch.Event("lag", enable_timing=True) for _ in range(4)]
    with lag.held(side), lag.stream(side):
        events[0].record()
        on_device.copy_(pinned, non_blocking=True)
        events[1].record()
        pinned.copy_(on_device, non_blocking=True)
        events[2].record()
        lag.sleep(0.03)
        events[3].record()
        assert not events[0].query()  # all of it was queued before any of it ran
    side.synchronize()
    from_host, to_host, asleep = (
        before.elapsed_time(after) for before, after in itertools.pairwise(events)
    )
    assert from_host >= 10 and to_host >= 20 and asleep >= 30


def test_what_streams_did_is_recorded_in_order_and_only_when_asked_for(lag: LagModule) -> None:
    stream = lag.current_stream()
    lag.sleep(0.001)
    lag.synchronize()
    with lag.recorded() as spans:
        x = torch.ones(NUM, device="lag")
        lag.sleep(0.002)
        x.to("cpu")
    lag.sleep(0.001)
    lag.synchronize()
    assert [span.kind for span in spans] == ["kernel", "sleep", "copy"]
    assert {(span.device, span.stream) for span in spans} == {(0, stream.stream_id)}
    assert spans[1].ended_s - spans[1].began_s >= 0.002
    for earlier, later in itertools.pairwise(spans):
        assert earlier.ended_s <= later.began_s


def test_copies_of_one_direction_share_its_bandwidth(lag: LagModule) -> None:
    pinned = [torch.zeros(100_000, dtype=torch.uint8).pin_memory() for _ in range(2)]
    on_device = [one.to("lag") for one in pinned]
    lag.set_bandwidth(from_host=10e6)
    begin, ends = torch.Event("lag", enable_timing=True), []
    begin.record()
    for source, target in zip(pinned, on_device, strict=True):
        with lag.stream(lag.Stream("lag")):
            lag.current_stream().wait_event(begin)
            target.copy_(source, non_blocking=True)
            ends.append(torch.Event("lag", enable_timing=True))
            ends[-1].record()
    lag.synchronize()
    assert max(begin.elapsed_time(end) for end in ends) >= 20


def test_launches_cost_the_host_what_a_test_says(lag: LagModule) -> None:
    x = torch.zeros(4, device="lag")
    lag.set_launch_cost(2000)
    begin_s = time.perf_counter()
    for _ in range(5):
        x.add_(1)
    assert time.perf_counter() - begin_s >= 0.01


# -- Devices, errors, ends ------------------------------------------------------------------------


def test_each_device_has_streams_and_memory_of_its_own(lag: LagModule) -> None:
    assert lag.device_count() == 2
    before = [lag.memory_allocated(n) for n in range(2)]
    with lag.held(lag.current_stream(0)):
        late = torch.ones(NUM, device="lag:0")
        quick = torch.ones(NUM, device="lag:1")
        assert quick.cpu().tolist() == [1.0] * NUM
        assert not lag.current_stream(0).query()
        with lag.device(1):
            assert torch.empty(1, device="lag").device.index == 1
        assert lag.current_device() == 0
    assert [lag.memory_allocated(n) - b for n, b in enumerate(before)] == [4096, 4096]
    assert torch.equal(late.to("lag:1").cpu(), quick.cpu())


def test_kernels_errors_are_raised_later_and_once(lag: LagModule) -> None:
    table = torch.zeros(3, 2, device="lag")
    with lag.held(lag.current_stream()):
        torch.nn.functional.embedding(torch.tensor([5]).to("lag", non_blocking=True), table)
    with pytest.raises(IndexError):
        lag.synchronize()
    lag.synchronize()
    with pytest.raises(RuntimeError, match=r"mat1|size"):  # the host sees this one at once
        _ = table @ table


def test_what_was_queued_behind_a_kernel_that_failed_never_runs(lag: LagModule) -> None:
    table, kept = torch.zeros(3, 2, device="lag"), torch.zeros(3, device="lag")
    other = torch.Stream("lag")
    lag.synchronize()
    with lag.held(lag.current_stream()):
        torch.nn.functional.embedding(torch.tensor([5]).to("lag", non_blocking=True), table)
        kept.add_(1)
        other.wait_stream(lag.current_stream())
        with lag.stream(other):
            kept.add_(1)
    with pytest.raises(IndexError):
        lag.synchronize()
    lag.synchronize()
    kept.add_(3)
    assert kept.tolist() == [3, 3, 3]


def test_tensors_still_to_be_conjugated_or_negated_count_as_such(lag: LagModule) -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    y = x.to("lag")
    assert torch.equal((y @ y.mH).cpu(), x @ x.mH)
    assert torch.equal((y.conj().imag @ y.imag).cpu(), x.conj().imag @ x.imag)
    assert torch.equal(x.conj().to("lag").cpu(), x.conj().resolve_conj())
    assert torch.equal(y.conj().cpu(), x.conj().resolve_conj())


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the main thread. Autograd's threads keep the number with which they have started."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
def test_convolutions_and_losses_compute_what_a_cpu_does_without_waiting(lag: LagModule) -> None:
    of_cpu = [torch.randn(*shape) for shape in ((2, 4, 8, 8), (6, 4, 3, 3), (6,))]
    of_lag = [tensor.to("lag") for tensor in of_cpu]
    lag.synchronize()
    before = lag.counters()["operations_that_waited"]
    results = []
    for tensors in (of_cpu, of_lag):
        x, weight, bias = (tensor.requires_grad_() for tensor in tensors)
        y = torch.nn.functional.conv2d(x, weight, bias, padding=1)
        loss = torch.nn.functional.mse_loss(y, torch.zeros_like(y))
        loss = loss + torch.nn.functional.smooth_l1_loss(y, torch.ones_like(y))
        results.append((y, loss, *torch.autograd.grad(loss, (x, weight, bias))))
    assert lag.counters()["operations_that_waited"] == before
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_statistics_are_those_that_a_cpu_keeps(lag: LagModule) -> None:
    """Of operators for which a GPU would keep others: of another type, or where a CPU has none."""
    x = torch.randn(5, 4, 3, dtype=torch.bfloat16)
    vectors = torch.rand(4, 4, dtype=torch.bfloat16).unbind()
    rows, bags = torch.tensor([1, 2, 4, 0]), torch.tensor([0, 2])
    for training in (True, False):
        arguments = (x, *vectors, training, 0.1, 1e-5)
        on_lag = [a.to("lag") if isinstance(a, torch.Tensor) else a for a in arguments]
        for ours, theirs in zip(
            torch.native_batch_norm(*on_lag), torch.native_batch_norm(*arguments), strict=True
        ):
            assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
    for mode in ("sum", "mean", "max"):
        table = torch.arange(10.0).view(5, 2).requires_grad_()
        ours = table.detach().to("lag").requires_grad_()
        for of, device in ((table, "cpu"), (ours, "lag")):
            inputs = rows.to(device), of, bags.to(device)
            torch.nn.functional.embedding_bag(*inputs, mode=mode).sum().backward()
        assert torch.equal(ours.grad.cpu(), table.grad)


ENDS = {
    "while kernels run": "lag.set_delays(2000, 2000); [x.add_(1) for _ in range(50)]",
    "while a stream is held": "held = lag.held(lag.current_stream()); held.__enter__(); x.add_(1)",
    "while a stream sleeps for an hour": "lag.sleep(3600); x.add_(1)",
    "after a backward": "x.requires_grad_(); (x * 2).sum().backward()",
    "with tensors in a module": "torch.kept = x",
    "after an error that nobody saw": (
        "torch.nn.functional.embedding(torch.full((1,), 5, device='lag'), x.view(2, 2))"
    ),
    "after a look at device memory": "ctypes.string_at(x.data_ptr(), 4)",
}
# Forks a process for each, which ends as processes do.
SCRIPT = """
import ctypes, os, sys, torch
from tests.support.lag import load
for what in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        lag = load()
        x = torch.zeros(4, device="lag")
        exec(what)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_processes_end_cleanly_unless_they_look_at_device_memory(lag: LagModule) -> None:
    command = [sys.executable, "-c", SCRIPT, *ENDS.values()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    codes = dict(zip(ENDS, map(int, ended.stdout.split()), strict=True))
    expected = dict.fromkeys(ENDS, 0) | {"after a look at device memory": -signal.SIGSEGV}
    assert codes == expected, ended.stderr
    assert ended.stderr.count("a kernel failed and nobody asked") == 1, ended.stderr
