# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# GPT of 7 G parameters in the manner of LLaMA 2 7B (arXiv 2307.09288): rotary positions, RMSNorm,
# a gated unit, no biases. One node; two GPUs share a copy of the model.
MODEL=gpt
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=32000 # of LLaMA's tokenizer; used while no tokenizer is given
FLAGS=(
    # the network
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008              # of the gated unit, which has three matrices of it
    --num-attention-heads 32             # 128 wide each
    --seq-length 4096                    # tokens of a sample
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0                # enough text that no sample comes twice
    --hidden-dropout 0
    # one copy of the model: 2 GPUs, so that 8 GPUs are 4 data-parallel ranks. Weights and gradients
    # take 6 bytes a parameter, the optimizer 12 divided by 4 ranks, all divided by 2: 30 GB
    --tensor-model-parallel-size 2       # within a node: it communicates in every layer
    --pipeline-model-parallel-size 1
    --sequence-parallel                  # also divides norms and dropout among the two
    # a step: 4 M tokens
    --micro-batch-size 2                 # samples at once on a rank: offload makes room for more
    --global-batch-size 1024             # samples of all ranks together
    # the schedule: 2 T tokens
    --train-iters 477000
    --lr 3e-4
    --min-lr 3e-5                        # a tenth, reached at the end
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
