# SPDX-License-Identifier: Apache-2.0
# NVIDIA's PyTorch image (PyTorch, CUDA, NCCL, Transformer Engine) with megatron-core and this package.
#   docker build -t megatron-offload --build-arg BASE=IMAGE .
# IMAGE: a PyTorch image from NVIDIA's catalogue, 25.09 or later, by its full name.
#   docker run --gpus all --rm -it -v /path/on/ssd:/ssd megatron-offload \
#       ./examples/pretrain_gpt.sh --activation-offload-dir /ssd
ARG BASE
FROM ${BASE}

WORKDIR /srv/megatron-offload
COPY . .
# The image's own torch stays: megatron-core and this package are installed without their dependencies.
RUN pip install --no-cache-dir --no-deps megatron-core==0.16.1 \
    && pip install --no-cache-dir tokenizers tqdm tabulate psutil pytest pytest-timeout hypothesis \
    && pip install --no-cache-dir --no-deps --no-build-isolation --editable .

RUN useradd --create-home trainer && chown -R trainer /srv/megatron-offload
USER trainer
# The scripts use the image's Python instead of making an environment of their own.
ENV MEGATRON_OFFLOAD_PYTHON=python3
CMD ["./examples/pretrain_gpt.sh"]
