# SPDX-License-Identifier: Apache-2.0
"""A small trainer on megatron-core alone.

Reading order: arguments, distributed, tokenizer, corpus, data, attention, layers, loss, model, gpt,
masked, bert, t5, optimizer, checkpointing, metrics, training, start. A file imports only from those
before it.
"""
