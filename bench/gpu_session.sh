#!/usr/bin/env bash
# Everything that is measured on a machine with a GPU, one step after the other, each within its own time.
#
#   bench/gpu_session.sh [--within SECONDS] [--python PYTHON] [STEP ...]      all steps when none is named
#
# Steps: tests (kernels' tests that need a GPU), check (the engine's promises), kernels and step-kernels (each kernel beside
# its bound); link, then decode, prefill, handover and picture of flash48 (Flash-Next, 48 layers, 24 GiB, 262,144 tokens of
# context), flash24 and 30b (as llama.cpp was measured: 9 and 10 GiB of slots, router rows scaled by rank^-0.4),
# launches of flash48 (kernels of a step), and prefill and decode of bf16 (the 30B with 16 layers, bf16 experts, 63 % of them in slots).
# A step that fails or runs out of time (it then writes what it has) does not stop the others; the exit status is the
# number of such steps. Results go to $OUT/session.tar.gz when OUT is set, packed again after every step, else to
# bench/results. `link` must have run once before the others: they take their bounds from the newest link-*.json.
# Needs the packages of makeway and Triton; nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.."

within=505 python=python3 steps=()
while [ $# -gt 0 ]; do
    case "$1" in
    --within) within=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    -*) echo "unknown option $1" >&2 && exit 2 ;;
    *) steps+=("$1") && shift ;;
    esac
done
if [ ${#steps[@]} -eq 0 ]; then
    steps=(tests check kernels step-kernels link decode-flash48 prefill-flash48 decode-flash24 prefill-flash24 decode-30b prefill-30b handover-flash48
        picture-flash48 launches-flash48 prefill-bf16 decode-bf16)
fi
results=bench/results
if [ -n "${OUT:-}" ]; then results=$(mktemp -d); fi
mkdir -p "$results"
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import triton, makeway.cli'; then
    echo "packages are missing (above); install makeway[gpu] or put them on PYTHONPATH" >&2
    exit 2
fi

# Prefill gets a budget in which as many slots remain (131, 81 and 81), so that it lends as it always does; with --slots
# and room to spare nothing is lent.
flash48=(--shape flash-next --layers 48 --ple-rows 0 --vram 24GiB --context 262144)
flash24=(--shape flash-next --layers 24 --ple-rows 0 --skew 0.4 --locality 0)
a30b=(--shape qwen3-30b-a3b --skew 0.4 --locality 0)
bf16=(--shape qwen3-30b-a3b-bf16)
flash24_slots=(--vram 24GiB --slots 131) flash24_budget=(--vram 14191MiB)
a30b_slots=(--vram 24GiB --slots 81) a30b_budget=(--vram 16671MiB)
bf16_slots=(--vram 24GiB --slots 81) bf16_budget=(--vram 16269MiB)

# limit in seconds, then Python's arguments (-m or a file) or those of `makeway bench`; empty for a step that does not exist
arguments() {
    case "$1" in
    tests) echo 120 -m pytest -q -m 'not(slow)' tests/kernels/{cuda,triton}/test_launch.py tests/kernels/triton/test_{attend,choose,index,guess,step_plan}.py ;;
    check) echo 150 bench/gpu_check.py ;;
    kernels) echo 60 -m bench.cuda_kernels ;;
    step-kernels) echo 120 -m bench.step_kernels ;;
    link) echo 45 link ;;
    decode-flash48) echo 110 decode "${flash48[@]}" --rows 1,4,8 --contexts 256,8192,119000 --steps 16 ;;
    decode-flash24) echo 80 decode "${flash24[@]}" "${flash24_slots[@]}" --rows 1,4 --contexts 256,8192 --steps 16 ;;
    decode-30b) echo 70 decode "${a30b[@]}" "${a30b_slots[@]}" --rows 1,4 --contexts 256,8192,32768 --steps 16 ;;
    prefill-flash48) echo 150 prefill "${flash48[@]}" --lengths 256,1024,8192,32768,119000 --repeats 2 ;;
    prefill-flash24) echo 60 prefill "${flash24[@]}" "${flash24_budget[@]}" --lengths 256,8192 --arms-at 8192 ;;
    prefill-30b) echo 50 prefill "${a30b[@]}" "${a30b_budget[@]}" --lengths 256,8192,32768 --arms-at 8192 ;;
    launches-flash48) echo 60 decode "${flash48[@]}" --rows 1 --contexts 256 --hits 100 --steps 16 --launches ;;
    prefill-bf16) echo 60 prefill "${bf16[@]}" "${bf16_budget[@]}" --lengths 256,8192,32768 --arms-at 8192 ;;
    decode-bf16) echo 60 decode "${bf16[@]}" "${bf16_slots[@]}" --rows 1 --contexts 256,8192,32768 --hits 100,0 --steps 16 ;;
    handover-flash48) echo 80 handover "${flash48[@]}" --prompt 8192 --handovers 5 ;;
    picture-flash48) echo 60 picture "$results/prompt.png" "${flash48[@]}" --prompt 8192 ;;
    esac
}

pack() {
    if [ -n "${OUT:-}" ]; then tar -C "$results" -czf "$OUT/session.tar.gz" .; fi
}

failed=0 end=$((SECONDS + within))
for step in "${steps[@]}"; do
    read -r -a words <<<"$(arguments "$step")"
    if [ ${#words[@]} -eq 0 ]; then
        echo "there is no step $step" >&2
        exit 2
    fi
    limit=${words[0]} left=$((end - SECONDS))
    if [ "$left" -lt 20 ]; then
        echo "== $step: not run, $left s are left"
        failed=$((failed + 1))
        continue
    fi
    command=("${words[@]:1}")
    if [[ ${command[0]} != -* && ${command[0]} != *.py ]]; then
        command=(-c 'from makeway.cli import main; main()' bench "${command[@]}" --results "$results")
        if [ "$step" != link ]; then
            rates=$(ls -t "$results"/link-*.json bench/results/link-*.json 2>/dev/null | head -n 1)
            if [ -n "$rates" ]; then command+=(--rates "$rates"); fi
            command+=(--allow-reference) # shown, and named as such, rather than lost
        fi
    fi
    began=$SECONDS
    echo "== $step: ${command[*]}"
    timeout --signal=INT --kill-after=30 $((limit < left ? limit : left)) "$python" "${command[@]}" 2>&1 |
        tee -a "$results/session.log" | cut -c 1-400
    status=${PIPESTATUS[0]}
    echo "== $step: status $status after $((SECONDS - began)) s"
    if [ "$status" -ne 0 ]; then failed=$((failed + 1)); fi
    pack
done
exit "$failed"
