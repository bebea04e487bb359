# Everything of this repository for an NVIDIA GPU of Ampere or newer, and a driver for CUDA 13 (580 or newer):
#   docker build -t paddle_te .
#   docker run --gpus all --shm-size 16g -v "$PWD:/work" paddle_te paddle-te selftest
# CUDA's libraries and compiler are pip packages, in the versions of the lock. The image has no driver: docker brings the
# machine's. tests/end_to_end/test_dockerfile.py runs these steps without docker.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*

COPY . /opt/paddle_te
WORKDIR /opt/paddle_te
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
RUN pip install --no-cache-dir -c locks/python3.12.txt '.[cpu,paddlenlp,data,te-cu13,nvgpu]'
RUN pip install --no-cache-dir ./nvgpu

WORKDIR /work
CMD ["paddle-te", "--help"]
