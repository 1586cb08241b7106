# The image of all parts: operator, autoscaler, routers, simulated engines, and the command line.
#
#     docker build -t REGISTRY/fulcrum:TAG .
#
# BASE is any image with Python 3.11 or newer and its pip; a digest, so that the same sources give the same image.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
# Packages first: they change less often than our own lines. Every one comes by its hash.
COPY requirements/image.lock requirements/compiled.lock requirements/
RUN python3 -m venv --without-pip /opt/fulcrum && \
    python3 -m pip --python /opt/fulcrum/bin/python install --require-hashes -r requirements/image.lock
# What builds the package, mypyc included, is in a lock, too, and not in the image; nor is the C compiler.
RUN python3 -m venv --without-pip /opt/build && \
    python3 -m pip --python /opt/build/bin/python install --require-hashes -r requirements/compiled.lock
RUN command -v cc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; }
COPY pyproject.toml README.md LICENSE ./
COPY core/ core/
COPY cluster/ cluster/
COPY router/ router/
COPY autoscaler/ autoscaler/
COPY operator/ operator/
COPY simulator/ simulator/
COPY cli/ cli/
COPY examples/ examples/
COPY tools/compiled/ tools/compiled/
# The data path of the router is compiled; FULCRUM_COMPILED=0 leaves it Python.
ARG FULCRUM_COMPILED=1
RUN FULCRUM_COMPILED=${FULCRUM_COMPILED} \
    python3 -m pip --python /opt/build/bin/python wheel --no-build-isolation --no-deps --wheel-dir /wheel . && \
    python3 -m pip --python /opt/fulcrum/bin/python install --no-index --no-deps /wheel/*.whl

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="fulcrum" \
      org.opencontainers.image.description="Keeps the split between prefill and decode right while LLM requests run." \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/fulcrum /opt/fulcrum
# Nothing is written but below /tmp, so that the root filesystem may be read-only.
ENV PATH=/opt/fulcrum/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
STOPSIGNAL SIGTERM
CMD ["fulcrum", "--help"]
