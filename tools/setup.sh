# Sourced by tools/run and tools/test: `prepare` makes .venv in the checkout
# and installs the project there, unless that is already done for this
# setup.py, this folder and this Python. Nothing else on the machine changes.

export DO_NOT_TRACK=1 HF_HUB_DISABLE_TELEMETRY=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[%s] %s\n' "${0##*/}" "$*" >&2; }

find_python() {
  local python
  for python in ${PYTHON:-python3.11 python3 python}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  say "no Python 3.11 or newer found; name one: PYTHON=/path/to/python3.11"
  return 2
}

# step WORDS COMMAND...: runs it with its output in .venv/setup.log, and says
# how long it took, or the end of the log and how to go on.
step() {
  local words=$1 start=$SECONDS
  shift
  say "$words ..."
  if ! "$@" </dev/null >>.venv/setup.log 2>&1; then
    tail -n 15 .venv/setup.log >&2
    say "$words: failed; all of it is in .venv/setup.log"
    return 1
  fi
  say "$words: done in $((SECONDS - start)) s"
}

install() {
  # Only modules that are used get compiled: a quarter less on the disk.
  .venv/bin/python -m pip install --no-compile -e .
}

prepare() {
  local python stamp
  python=$(find_python)
  stamp=$({ cat setup.py; pwd; "$python" -VV; } | cksum)
  mkdir -p .venv
  exec 9>.venv/setup.lock
  ! command -v flock >/dev/null || flock 9  # another may be at it
  if [[ $(cat .venv/setup.stamp 2>/dev/null) != "$stamp" ]]; then
    rm -f .venv/setup.stamp .venv/setup.log
    step "making .venv" "$python" -m venv .venv
    step "installing rlpost and what it needs, about 1 GB" install
    echo "$stamp" >.venv/setup.stamp
  fi
  exec 9>&-
}
