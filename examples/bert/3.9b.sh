# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# BERT of 3.9 G parameters; shape, batch and schedule as in arXiv 1909.08053. One node; two GPUs share a
# copy of the model.
MODEL=bert
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=30522 # of BERT's uncased WordPiece vocabulary
FLAGS=(
    # the network
    --num-layers 48
    --hidden-size 2560
    --num-attention-heads 40             # 64 wide each
    --seq-length 512                     # tokens of a sample: two segments
    --max-position-embeddings 512        # learned ones: no sample may be longer
    --attention-dropout 0.1
    --hidden-dropout 0.1
    # one copy of the model: 2 GPUs, so that 8 GPUs are 4 data-parallel ranks. Weights and gradients
    # take 6 bytes a parameter, the optimizer 12 divided by 4 ranks, all divided by 2: 17 GB
    --tensor-model-parallel-size 2       # within a node: it communicates in every layer
    --pipeline-model-parallel-size 1
    --sequence-parallel                  # also divides norms and dropout among the two
    # a step: 0.5 M tokens
    --micro-batch-size 16                # samples at once on a rank: offload makes room for more
    --global-batch-size 1024             # samples of all ranks together
    # the schedule
    --train-iters 2000000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style linear
    --lr-warmup-iters 10000
    --weight-decay 0.01
    --clip-grad 1.0
)
