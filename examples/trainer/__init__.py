# SPDX-License-Identifier: Apache-2.0
"""A small trainer on megatron-core alone.

Reading order: arguments, distributed, tokenizer, data, attention, model, gpt, optimizer,
checkpointing, metrics, training. A file imports only from those before it.
"""
