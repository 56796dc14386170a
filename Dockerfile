# CPU:   docker build -t penjing:cpu .
# CUDA:  docker build -t penjing:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 \
#            --build-arg TORCH_INDEX=https://pypi.org/simple .
# Train: docker run --gpus all --ipc=host -v "$PWD:/work" penjing:cuda train pretrain data.train=corpus.jsonl --gpus 2
ARG BASE=debian:trixie-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A C compiler and Python's headers: kernels are built on the machine that runs them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE constraints.txt /penjing/
COPY src /penjing/src
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
        -c /penjing/constraints.txt "/penjing[hf,chat,serve,data]"
ENV PATH=/venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["penjing"]
