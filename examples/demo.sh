#!/usr/bin/env bash
# The whole job on a real target: make it, extract once, look at the store, train a drafter, decode with it, export it.
# Called by `make demo` with BIN (the environment's bin folder) and DEMO (where everything goes).
set -euo pipefail
run() { echo; echo "\$ draftcache $*"; "$BIN/draftcache" "$@"; }

mkdir -p "$DEMO"
"$BIN/python" examples/smollm2_target.py "$DEMO/smollm2"
rm -rf "$DEMO/run" "$DEMO/drafter"

run extract --target "$DEMO/smollm2" --data examples/conversations.jsonl --store "$DEMO/store" --overwrite \
    --buckets 64,96,128,160,192,256,320 --token-budget 4096 --dtype float32 --limit 220
run stats --store "$DEMO/store"
# SmolLM2's tokenizer uses every row of its embedding, so the mask token must be chosen: 5 is <file_sep>.
run train --store "$DEMO/store" --out "$DEMO/run" --num-layers 1 --block-size 4 --mask-token-id 5 \
    --batching packed --token-budget 1024 --anchors 64 --teacher tokens --lr 2e-3 --steps 450
run evaluate --checkpoint "$DEMO/run" --target "$DEMO/smollm2" --data examples/heldout.jsonl \
    --limit 10 --max-new-tokens 40 --dtype float32
run export --checkpoint "$DEMO/run" --out "$DEMO/drafter" --store "$DEMO/store"
