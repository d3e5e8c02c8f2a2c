# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# T5 of 11 G parameters: the layers of T5-11B (arXiv 1910.10683), but with hidden size 4096 and
# attention as wide as it, where T5-11B has 1024 and attention 16 times as wide. One node of 8 GPUs
# holds a copy; every further node is a data-parallel rank.
MODEL=t5
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=30622 # BERT's uncased WordPiece vocabulary and 100 sentinels
FLAGS=(
    # the network
    --num-layers 24                      # of the encoder, and as many of the decoder
    --hidden-size 4096
    --ffn-hidden-size 16384
    --num-attention-heads 64             # 64 wide each
    --seq-length 512                     # tokens of the encoder
    --decoder-seq-length 128             # tokens of the decoder: the masked spans
    --max-position-embeddings 512        # learned ones: no sample may be longer
    --attention-dropout 0.1
    --hidden-dropout 0.1
    # one copy of the model: 8 GPUs. Weights and gradients take 6 bytes a parameter, the optimizer 12
    # divided by 1 data-parallel rank, all divided by 8: 26 GB
    --tensor-model-parallel-size 8       # within a node: it communicates in every layer
    --pipeline-model-parallel-size 1     # megatron-core 0.16.1 has no pipeline for T5
    --sequence-parallel                  # also divides norms and dropout among the eight
    # a step: 0.3 M tokens
    --micro-batch-size 16                # samples at once on a rank: offload makes room for more
    --global-batch-size 512              # samples of all ranks together
    # the schedule
    --train-iters 1000000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style linear
    --lr-warmup-iters 10000
    --weight-decay 0.01
    --clip-grad 1.0
)
MEGATRON_LM_FLAGS=(--vocab-extra-ids 100) # the bundled trainer finds the sentinels in the tokenizer
