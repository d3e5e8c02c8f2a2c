# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# GPT of 22 G parameters; shape and layout as in arXiv 2205.05198, table 3. One node of 8 GPUs holds a
# copy of the model; every further node is a data-parallel rank.
MODEL=gpt
NNODES="${NNODES:-2}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=50257 # of GPT-2's tokenizer; used while no tokenizer is given
FLAGS=(
    # the network
    --num-layers 48
    --hidden-size 6144
    --num-attention-heads 64             # 96 wide each
    --seq-length 2048                    # tokens of a sample
    --max-position-embeddings 2048       # learned ones: no sample may be longer
    --attention-dropout 0                # enough text that no sample comes twice
    --hidden-dropout 0
    --init-method-std 0.006              # smaller than for small models
    # one copy of the model: 8 GPUs. Weights and gradients take 6 bytes a parameter, the optimizer 12
    # divided by 2 data-parallel ranks, all divided by 8: 33 GB (one node alone: 50 GB)
    --tensor-model-parallel-size 8       # within a node: it communicates in every layer
    --pipeline-model-parallel-size 1
    --sequence-parallel                  # also divides norms and dropout among the eight
    # a step: 2 M tokens
    --micro-batch-size 4                 # samples at once on a rank: offload makes room for more
    --global-batch-size 1024             # samples of all ranks together
    # the schedule: 300 G tokens
    --train-iters 143000
    --lr 1e-4
    --min-lr 1e-5                        # a tenth, reached at the end
    --lr-decay-style cosine
    --lr-warmup-iters 180                # 375 M tokens
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
