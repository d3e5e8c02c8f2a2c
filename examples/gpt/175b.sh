# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# GPT of 175 G parameters: GPT-3. Layout as in arXiv 2205.05198, table 3: eight nodes of 8 GPUs hold a
# copy of the model; 16 nodes are two data-parallel ranks.
MODEL=gpt
NNODES="${NNODES:-8}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=50257 # of GPT-2's tokenizer; used while no tokenizer is given
FLAGS=(
    # the network
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96             # 128 wide each
    --seq-length 2048                    # tokens of a sample
    --max-position-embeddings 2048       # learned ones: no sample may be longer
    --attention-dropout 0                # enough text that no sample comes twice
    --hidden-dropout 0
    --init-method-std 0.006              # smaller than for small models
    # one copy of the model: 64 GPUs. Weights and gradients take 6 bytes a parameter, the optimizer 12
    # divided by 1 data-parallel rank, all divided by 64: 49 GB
    --tensor-model-parallel-size 8       # within a node: it communicates in every layer
    --pipeline-model-parallel-size 8     # between nodes: 12 layers on each
    --num-layers-per-virtual-pipeline-stage 4 # three rounds through the nodes: a third of the idle time
    --sequence-parallel                  # also divides norms and dropout among the eight
    # a step: 3.1 M tokens
    --micro-batch-size 1                 # samples at once in a stage
    --global-batch-size 1536             # a multiple of 8 for each rank, as the virtual stages ask for
    # the schedule: 300 G tokens
    --train-iters 95000
    --lr 6e-5
    --min-lr 6e-6                        # a tenth, reached at the end
    --lr-decay-style cosine
    --lr-warmup-iters 120                # 375 M tokens
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
)
