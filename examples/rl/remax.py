# SPDX-License-Identifier: Apache-2.0
"""ReMax on a toy reward: no value model, activations on the SSD, a reference that is read once.

    python examples/rl/remax.py                          # 3 seeds, both comparisons, a plot: 3 min
    python examples/rl/remax.py --seeds 1 --steps 60 --comparisons ""

The policy is a small Llama that stays as it is, with adapters (LoRA) that are trained. In each step
it generates an answer to each prompt, and is rewarded by the share of its tokens that are among the
first quarter of the vocabulary. ReMax (Li et al. 2023, arXiv 2310.10505) takes as the baseline the
reward of the greedy answer to the same prompt: there is no value model to keep and to train. A
penalty keeps the policy near the reference, the model without adapters.

What is ours: `offload_activations` moves what the policy's training pass saves,
`offload_parameters` keeps the reference on the SSD, and `LayerMajor.evaluate` reads it once a step
for all batches.

`--comparisons off,value`: the first seed once more with all activations in memory, which has the
same bits, and with a value model in the baseline's place, as PPO has: a second Llama with a scalar
for each token, all of it trained, its activations and the policy's on the SSD too. `memory`: the
most that a run's process takes, over what it took for a step of a tiny model.

Exit code: 0 as promised (rewards rise, same bits, at most half of the memory), 1 not.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from megatron.offload import LayerMajor, offload_activations, offload_parameters
from megatron.offload.machine.allocator import allocator_environment

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, REWARDED = 64, 16  # tokens, of which the first ones are rewarded
PROMPT = 4  # tokens
PENALTY = 0.01  # of the difference of log-probabilities to the reference, added up over an answer
LAST = 5  # steps whose mean reward counts


class ValueModel(torch.nn.Module):
    """What PPO has and ReMax has not: an expected reward behind each token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.body = LlamaModel(config)
        self.head = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.head(self.body(tokens).last_hidden_state).squeeze(-1)
        return values[:, PROMPT - 1 : -1]  # before each token of the answer


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The share of each answer's tokens that are rewarded."""
    return (tokens[:, PROMPT:] < REWARDED).float().mean(-1)


def log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token of the answers: samples x tokens."""
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    return -cross_entropy(logits.transpose(1, 2), tokens[:, PROMPT:], reduction="none")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One training; its rewards, a digest of its adapters, and the memory that it took."""
    before_bytes = peak_bytes()
    began_s = time.perf_counter()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=8 * args.hidden // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    base = LlamaForCausalLM(config)
    reference = copy.deepcopy(base).eval().requires_grad_(False)
    offload_parameters(reference, args.directory)
    in_units = LayerMajor(reference)
    policy = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.rate, weight_decay=0.0)
    models: list[torch.nn.Module] = [policy]
    if args.value_model:
        value = ValueModel(config)
        value_optimizer = torch.optim.AdamW(value.parameters(), lr=1e-3)
        models.append(value)
    offloads = [
        offload_activations(one, args.directory, mode=args.offload, min_bytes="64KiB")
        for one in models
    ]
    rewards: list[float] = []
    for _ in range(args.steps):
        prompts = torch.randint(1, VOCABULARY, (args.batch, PROMPT))
        policy.eval()
        with torch.no_grad():
            length = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens}
            sampled = policy.generate(prompts, do_sample=True, top_k=0, **length)
        reward = rewards_of(sampled)
        expected = torch.cat(in_units.evaluate(sampled.chunk(args.chunks), log_probs))
        if args.value_model:
            values = value(sampled)
            baseline = values.detach()
        else:
            with torch.no_grad():
                greedy = policy.generate(prompts, do_sample=False, **length)
            baseline = rewards_of(greedy).unsqueeze(-1)
        policy.train()
        found = log_probs(policy, sampled)
        penalty = PENALTY * (found.detach() - expected).sum(-1)
        advantage = (reward - penalty).unsqueeze(-1) - baseline
        (-(advantage * found).sum(-1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.value_model:
            (values - reward.unsqueeze(-1)).square().mean().backward()
            value_optimizer.step()
            value_optimizer.zero_grad()
        rewards.append(float(reward.mean()))
    digest = hashlib.sha256()
    for param in trained:
        digest.update(param.detach().numpy())
    return {
        "rewards": rewards,
        "weights": digest.hexdigest(),
        "memory_bytes": peak_bytes() - before_bytes,
        "offloaded_bytes": [one.statistics.get("offloaded_bytes", 0) for one in offloads],
        "seconds": time.perf_counter() - began_s,
    }


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- All runs -------------------------------------------------------------------------------------


def run(argv: list[str], *more: str) -> dict[str, Any]:
    """One training in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, **allocator_environment(keeps_for_reuse=False)}
    environment.setdefault("OMP_NUM_THREADS", "1")  # transfers have the other cores
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", __file__, *argv, "--run", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(more)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Rewards over steps, and the memory of each way."""
    from megatron.offload.commands.drawing import PALETTE, figure

    options = {"figsize": (11, 4.5), "width_ratios": (3, 2), "layout": "constrained"}
    with figure(path, columns=2, **options) as (drawn, (left, right)):
        for (name, one), color, marker in zip(runs.items(), PALETTE, "osD^vP*", strict=False):
            style = {"linestyle": "-" if name.startswith("seed") else "--", "marker": marker}
            steps = range(1, len(one["rewards"]) + 1)
            left.plot(steps, one["rewards"], label=name, color=color, markersize=4, **style)
            right.barh(name, one["memory_bytes"] / 2**20, color=color)
        left.set(xlabel="step", ylabel="reward, the mean of a step", ylim=(0, 1))
        left.grid(alpha=0.3)
        left.xaxis.get_major_locator().set_params(integer=True)
        right.invert_yaxis()
        right.set_xlabel("largest memory of the process, MiB")
        drawn.suptitle("ReMax: rewards and memory", fontsize=10)
        drawn.legend(fontsize=8, loc="outside lower center", ncols=5)


def summary_of(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether rewards have risen, whether bits are the same, and the memory of each way."""
    seeds = [one for name, one in runs.items() if name.startswith("seed")]
    means = [
        (sum(one["rewards"][:LAST]) / LAST, sum(one["rewards"][-LAST:]) / LAST) for one in seeds
    ]
    summary: dict[str, Any] = {
        "first_and_last_rewards": means,
        "rises": all(last >= first + 0.2 for first, last in means),
        "memory_bytes": max(one["memory_bytes"] for one in seeds),
    }
    if "activations in memory" in runs:
        off = runs["activations in memory"]
        same = ("rewards", "weights")
        summary["identical"] = all(off[name] == seeds[0][name] for name in same)
        summary["memory_over_off"] = summary["memory_bytes"] / off["memory_bytes"]
    if "value model" in runs:
        of_value = runs["value model"]["memory_bytes"]
        summary["memory_over_value_model"] = summary["memory_bytes"] / of_value
    return summary


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "default: %(default)s"
    parser.add_argument("--seeds", default="1,2,3", help=default)
    parser.add_argument("--comparisons", default="off,value", help=f"also run; {default}")
    parser.add_argument("--steps", type=int, default=20, help=default)
    parser.add_argument("--layers", type=int, default=3, help=default)
    parser.add_argument("--hidden", type=int, default=512, help=default)
    parser.add_argument("--batch", type=int, default=24, help=f"prompts a step; {default}")
    parser.add_argument("--chunks", type=int, default=4, help=f"of a reference; {default}")
    parser.add_argument("--tokens", type=int, default=8, help=f"of an answer; {default}")
    parser.add_argument("--rate", type=float, default=1e-2, help=f"of learning; {default}")
    parser.add_argument("--offload", default="ssd", help=f"of activations; {default}; off")
    parser.add_argument("--value-model", action="store_true", help="as PPO has")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/offload", help="on an SSD")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, default=ROOT / "runs/remax.png", help=default)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Runs all of them; the exit code."""
    argv = sys.argv[1:]
    args = make_parser().parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.run:
        tiny = {"hidden": 64, "layers": 2, "batch": args.chunks, "steps": 1}
        train(argparse.Namespace(**{**vars(args), **tiny}))  # libraries take memory too
        print(json.dumps(train(args)))
        return 0
    seeds = args.seeds.split(",")
    wanted = {f"seed {seed}": ["--seed", seed] for seed in seeds}
    comparisons = args.comparisons.split(",")
    if "off" in comparisons:
        wanted["activations in memory"] = ["--seed", seeds[0], "--offload", "off"]
    if "value" in comparisons:
        wanted["value model"] = ["--seed", seeds[0], "--value-model"]
    runs = {}
    for name, more in wanted.items():
        runs[name] = one = run(argv, *more)
        first, last = sum(one["rewards"][:LAST]) / LAST, sum(one["rewards"][-LAST:]) / LAST
        size = one["memory_bytes"] / 2**20
        seconds = one["seconds"]
        print(
            f"{name:22} reward {first:.2f} -> {last:.2f}, {size:6.1f} MiB, {seconds:.0f} s",
            flush=True,
        )
    summary = summary_of(runs)
    print(json.dumps(summary))
    if args.json is not None:
        args.json.write_text(json.dumps({"summary": summary, "runs": runs}, indent=1) + "\n")
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, args.plot)
    kept = summary.get("identical", True) and summary.get("memory_over_value_model", 0) <= 0.5
    return 0 if summary["rises"] and kept else 1


if __name__ == "__main__":
    sys.exit(main())
