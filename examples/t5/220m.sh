# shellcheck shell=bash disable=SC2034 # train.sh reads these variables
# SPDX-License-Identifier: Apache-2.0
#
# T5 of 220 M parameters: the shape of T5-Base (arXiv 1910.10683). One node; each GPU has the whole
# model.
MODEL=t5
NNODES="${NNODES:-1}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
VOCAB_SIZE=30622 # BERT's uncased WordPiece vocabulary and 100 sentinels
FLAGS=(
    # the network
    --num-layers 12                      # of the encoder, and as many of the decoder
    --hidden-size 768
    --ffn-hidden-size 3072
    --num-attention-heads 12             # 64 wide each
    --seq-length 512                     # tokens of the encoder
    --decoder-seq-length 128             # tokens of the decoder: the masked spans
    --max-position-embeddings 512        # learned ones: no sample may be longer
    --attention-dropout 0.1
    --hidden-dropout 0.1
    # one copy of the model: 1 GPU, so that 8 GPUs are 8 data-parallel ranks
    --tensor-model-parallel-size 1       # it fits; splitting it would only cost communication
    --pipeline-model-parallel-size 1     # megatron-core 0.16.1 has no pipeline for T5
    # a step: 0.3 M tokens
    --micro-batch-size 32                # samples at once on a GPU: offload makes room for more
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
