#!/bin/sh
# Makes /opt/java and /opt/native while an image is built, from MMS's jar in /opt/venv.
#
# /opt/java is the JDK's own runtime with the modules that the jar refers to. /opt/native has the
# library with which Netty listens on a unix socket: Netty would unpack and map it at run time, which
# a noexec tmpfs forbids. It goes to /usr/java/packages/lib, where Java looks.
set -eu

jar=$(echo /opt/venv/lib/python3.*/site-packages/mms/frontend/model-server.jar)
# The jar has gson's module-info: only as a part of the class path all of it is looked at. The last
# line is the answer, the others warn.
modules=$(jdeps --ignore-missing-deps --multi-release 17 --print-module-deps \
  --class-path "$jar" "$jar" | tail -n 1)
jlink --add-modules "$modules" --strip-debug --no-header-files --no-man-pages --compress=2 \
  --output /opt/java
mkdir /opt/native
cd /opt/native
machine=$(uname -m | sed s/aarch64/aarch_64/) # as Netty calls it
python -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as jar, open(sys.argv[2].rpartition("/")[2], "wb") as out:
    out.write(jar.read(sys.argv[2]))' \
  "$jar" "META-INF/native/libnetty_transport_native_epoll_$machine.so"
