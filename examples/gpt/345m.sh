# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# GPT of 345 M parameters: the shape of GPT-2 medium. One node; each GPU has the whole model.
# Learning rate and tokens of a step as GPT-3's smaller models (arXiv 2005.14165, table 2.1).
MODEL=gpt
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=50257 # of GPT-2's tokenizer; used while no tokenizer is given
FLAGS=(
    # the network
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16             # 64 wide each
    --seq-length 1024                    # tokens of a sample
    --max-position-embeddings 1024       # learned ones: no sample may be longer
    --attention-dropout 0.1
    --hidden-dropout 0.1
    # one copy of the model: 1 GPU, so that 8 GPUs are 8 data-parallel ranks
    --tensor-model-parallel-size 1       # it fits; splitting it would only cost communication
    --pipeline-model-parallel-size 1
    # a step: 0.5 M tokens
    --micro-batch-size 16                # samples at once on a GPU: offload makes room for more
    --global-batch-size 512              # samples of all ranks together
    # the schedule: 300 G tokens
    --train-iters 572000
    --lr 3e-4
    --min-lr 3e-5                        # a tenth, reached at the end
    --lr-decay-style cosine
    --lr-warmup-iters 700                # 375 M tokens
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
