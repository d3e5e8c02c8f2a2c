# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# BERT of 345 M parameters: the shape of BERT-large. One node; each GPU has the whole model.
# Batch and schedule as in arXiv 1909.08053.
MODEL=bert
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=30522 # of BERT's uncased WordPiece vocabulary
FLAGS=(
    # the network
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16             # 64 wide each
    --seq-length 512                     # tokens of a sample: two segments
    --max-position-embeddings 512        # learned ones: no sample may be longer
    --attention-dropout 0.1
    --hidden-dropout 0.1
    # one copy of the model: 1 GPU, so that 8 GPUs are 8 data-parallel ranks
    --tensor-model-parallel-size 1       # it fits; splitting it would only cost communication
    --pipeline-model-parallel-size 1
    # a step: 0.5 M tokens
    --micro-batch-size 32                # samples at once on a GPU: offload makes room for more
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
