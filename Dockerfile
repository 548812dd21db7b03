# The server in a container: README.md, "In a container", shows how it is built and run.
# BASE may be any Debian or Ubuntu with Python 3.11 or newer; for a GPU one of NVIDIA's, such as
# nvidia/cuda:12.8.1-base-ubuntu24.04, with EXTRAS=store,gpu and TORCH_INDEX= (torch as PyPI has it).
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG EXTRAS=store
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The compiler stays: kernels are compiled for the processor that the container runs on, and Triton
# compiles a launcher for each of its own.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vlm-serve
COPY LICENSE README.md pyproject.toml setup.py constraints.txt ./
COPY cache cache
COPY kernels kernels
COPY preprocess preprocess
COPY vlm_serve vlm_serve
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt setuptools \
    && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt --no-build-isolation \
        ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ".[${EXTRAS}]"

# Compiled kernels, and checkpoints from the hub, are kept below .cache: mount a volume there.
RUN useradd --create-home --uid 10001 vlm \
    && mkdir --parents /home/vlm/.cache \
    && chown vlm:vlm /home/vlm/.cache
USER vlm
WORKDIR /home/vlm

ENV VLM_SERVE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=10s \
    CMD ["/opt/venv/bin/python", "-Ic", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["/opt/venv/bin/vlm-serve"]
CMD ["serve", "demo"]
