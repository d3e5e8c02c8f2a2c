# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# GPT of 1.3 G parameters. One node; each GPU has the whole model.
# Learning rate and tokens of a step as GPT-3 XL (arXiv 2005.14165, table 2.1).
MODEL=gpt
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=50257 # of GPT-2's tokenizer; used while no tokenizer is given
FLAGS=(
    # the network
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16             # 128 wide each
    --seq-length 2048                    # tokens of a sample
    --max-position-embeddings 2048       # learned ones: no sample may be longer
    --attention-dropout 0                # enough text that no sample comes twice
    --hidden-dropout 0
    # one copy of the model: 1 GPU. Weights and gradients take 6 bytes a parameter, the optimizer 12
    # bytes divided by the 8 data-parallel ranks: 10 GB
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    # a step: 1 M tokens
    --micro-batch-size 8                 # samples at once on a GPU: offload makes room for more
    --global-batch-size 512              # samples of all ranks together
    # the schedule: 300 G tokens
    --train-iters 286000
    --lr 2e-4
    --min-lr 2e-5                        # a tenth, reached at the end
    --lr-decay-style cosine
    --lr-warmup-iters 360                # 375 M tokens
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
