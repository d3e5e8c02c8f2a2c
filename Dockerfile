# SPDX-License-Identifier: Apache-2.0
#
# NVIDIA's PyTorch image (PyTorch, CUDA, NCCL, Transformer Engine) with megatron-core and this package.
#
#   docker build -t megatron-offload --build-arg BASE=IMAGE .
#
# IMAGE is a PyTorch image from NVIDIA's catalogue, by its full name, whose PyTorch is 2.10 or newer; a
# pre-release such as 2.10.0a0 is older than that, for pip too. The build ends with the test suite on the
# CPU, so that an image that would not work is not made; with --build-arg TESTS= it does not, with
# --build-arg TESTS=tests/unit it runs a part.
#
#   docker run --gpus all --rm -it --shm-size 16g --ulimit memlock=-1 --ulimit stack=67108864 \
#       -v /nvme0/offload:/nvme -v /data/text:/data megatron-offload
#
# --shm-size        NCCL's ranks on one machine talk through /dev/shm, of which a container has 64 MB;
#                   --ipc=host gives it the machine's
# --ulimit memlock  pinned memory for offload's staging buffers, NCCL's and GPUDirect's registered memory
# /nvme             a directory on a local NVMe drive, with a file system that has O_DIRECT (ext4, xfs);
#                   the container's own file system is none. It must be writable for user 10001 (chown)
#                   or the container be run with --user. Several drives: a volume for each
# GPUDirect Storage (--build-arg EXTRAS=test,gds and --activation-offload-io gds): where it needs NVIDIA's
#                   kernel module nvidia-fs, -e NVIDIA_GDS=enabled has the container toolkit pass its
#                   devices in. `megatron-offload doctor` says whether it works
# io_uring          is forbidden by Docker's default seccomp profile, and this package does not use it.
#                   Only `megatron-offload bench` asks fio for it, and goes on with libaio
# examples/cluster/ has the same as a compose file, and the Slurm job for enroot with pyxis.
ARG BASE
FROM ${BASE}

WORKDIR /srv/megatron-offload
COPY . .

# An environment of its own over the image's packages, none of which is replaced. pip is the image's.
# The extra `test` brings what the trainer, the commands and the tests at the end need, and none of the
# tools that check sources; for `--dataloader-type dali` give --build-arg EXTRAS=test,dali.
# Versions are those of tools/constraints.txt, but torch and numpy those that the image was built with.
ARG EXTRAS=test
ENV PATH=/opt/megatron-offload/bin:$PATH
# hadolint ignore=DL3013 # PIP_CONSTRAINT has the version of setuptools, as of everything else
RUN python3 -m venv --without-pip --system-site-packages /opt/megatron-offload \
    && export PIP_CONSTRAINT=/opt/megatron-offload/constraints.txt \
    && grep -vE '^(torch|numpy)==' tools/constraints.txt >"$PIP_CONSTRAINT" \
    && python -c 'from importlib.metadata import version as v; \
        print("torch==" + v("torch"), "numpy==" + v("numpy"), sep="\n")' \
        >>"$PIP_CONSTRAINT" \
    && python -m pip install --no-cache-dir setuptools \
    && python -m pip install --no-cache-dir --no-build-isolation --editable ".[${EXTRAS}]"

# A number, because Kubernetes' runAsNonRoot cannot know a name.
RUN useradd --create-home --no-log-init --uid 10001 trainer \
    && mkdir /data /nvme \
    && ln -s /data data \
    && chown -R trainer:trainer /srv/megatron-offload /data /nvme
USER 10001:10001
VOLUME ["/data", "/nvme"]
# The scripts use this Python instead of making an environment of their own.
ENV MEGATRON_OFFLOAD_PYTHON=/opt/megatron-offload/bin/python

ARG TESTS=tests
# hadolint ignore=SC2086 # TESTS may name several files or directories
RUN [ -z "$TESTS" ] || ( \
        export CUDA_VISIBLE_DEVICES="" HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis \
        && python -m pytest -q -p no:cacheprovider $TESTS \
        && rm -rf /tmp/hypothesis )

CMD ["./examples/pretrain_gpt.sh", "--activation-offload-dir", "/nvme"]
