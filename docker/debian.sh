#!/bin/sh
# What an image has of Debian, while it is built: debian.sh build|server
set -eu

case $1 in
  build) packages='binutils ca-certificates g++ default-jdk-headless' ;;
  server)
    # libmxnet.so is linked with these; there is none for arm64.
    packages=
    [ "$(dpkg --print-architecture)" != amd64 ] || packages='libgomp1 libquadmath0'
    ;;
esac
mkdir -p /usr/share/man/man1 # without which openjdk cannot be installed
apt-get update
# shellcheck disable=SC2086
apt-get install -y --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*
if [ "$1" = server ]; then
  useradd --system --uid 10001 --home-dir /opt/kogpt2 kogpt2
  install -d -m 1777 /run/kogpt2 /var/cache/kogpt2
  rm "$0"
fi
