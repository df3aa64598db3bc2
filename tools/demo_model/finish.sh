#!/bin/bash
# Stages 5 to 7: export, checks, papers. finish.sh RUN1 [RUN2 ...]: the last is exported (PLOT_PYTHON may name a Python with matplotlib)
set -euo pipefail
run=${*: -1}
work=$(dirname "$0")/work
mkdir -p "$work/out"
python -m tools.demo_model.export --run "$run" --out "$work/out/demo.gguf"
python -m tools.demo_model.export --run "$run" --out "$work/out/demo-f16.gguf" --f16
i=0
for start in 0 100000; do
    i=$((i + 1))
    python -m tools.demo_model.verify "$work/out/demo.gguf" --reference "$work/out/demo-f16.gguf" \
        --start $start --json "$work/out/check$i.json" 2>"$work/out/verify$i.log"
done
python -m tools.demo_model.verify "$work/out/demo.gguf" --tokens 64 --samples 2>/dev/null \
    | sed -n '/^-----/,$p' >"$work/out/samples.txt"
python -m tools.demo_model.report data
"${PLOT_PYTHON:-python}" -m tools.demo_model.report plot --run "$@"
python -m tools.demo_model.report card --run "$@" --checks "$work"/out/check?.json \
    --samples "$work/out/samples.txt" --ship "$work/out/demo.gguf"
