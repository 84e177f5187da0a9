# megatron_kd on NVIDIA's NeMo container, which brings torch, Transformer Engine, apex, Megatron-Core and Megatron-Bridge.
#   docker build --build-arg COMMIT="$(git rev-parse HEAD)" --tag megatron-kd .
#   docker run --rm --gpus all --network none --volume /data:/data megatron-kd doctor
# The network is needed to build, not to run: models and corpora are mounted.
FROM nvcr.io/nvidia/nemo:26.08

ARG COMMIT=unknown
LABEL org.opencontainers.image.title="megatron-kd" \
      org.opencontainers.image.description="Knowledge distillation on Megatron-Bridge" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}"

# First what seldom changes: the small libraries that the image lacks, at the tested versions. The image's own torch and
# Megatron stay as they are (--no-deps).
WORKDIR /opt/megatron-kd
COPY requirements/container.txt requirements/
RUN python -m pip install --no-cache-dir --no-deps --requirement requirements/container.txt

COPY pyproject.toml README.md LICENSE ./
COPY megatron_kd megatron_kd
COPY recipes recipes
COPY slurm slurm
# The doctor fails the build if the image's versions are not those that this package was tested with.
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && useradd --uid 10001 --create-home --shell /bin/bash kd \
    && megatron-kd doctor --for dry-run --quick

USER 10001
WORKDIR /home/kd
ENV MEGATRON_KD_HOME=/opt/megatron-kd \
    HF_HUB_OFFLINE=1 \
    PYTHONDONTWRITEBYTECODE=1
HEALTHCHECK --interval=5m --timeout=1m CMD ["megatron-kd", "doctor", "--for", "train", "--quick"]
ENTRYPOINT ["megatron-kd"]
CMD ["doctor"]
