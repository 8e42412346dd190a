# The two other trainers: their environments, and a run of each in the folder it is started in. To be sourced where
# scripts/ lies, with
#
# dir      what `prepare` or `features` made; it is made, and becomes a whole path
# ours     bin folder of our own environment     rows     of a step, where a trainer counts rows
# length   tokens of the longest row             epochs   over the rows
# kept     checkpoints an epoch (0: only at its end)
#
# It sets
#
# here     scripts/compare                       peers    where the environments are (PEERS)
# threads  of each trainer (THREADS)             step     times length, the tokens of a step (STEP)
# torch    which torch is installed

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
here=$PWD/scripts/compare
peers=${PEERS:-$dir/venvs}
threads=${THREADS:-2}
step=${STEP:-2}
torch=${HEADSTART_TORCH:-torch==2.13.0}
export OMP_NUM_THREADS=$threads

# environment NAME PACKAGES... -- PACKAGES THAT COME WITHOUT THEIR DEPENDENCIES...
environment() {
  local name=$1 all=() pip
  shift
  [ ! -e "$peers/$name/made" ] || return 0
  say "an environment for $name"
  "$ours/python" -m venv "$peers/$name"
  pip=("$peers/$name/bin/python" -m pip --disable-pip-version-check -q install)
  while [ "$1" != -- ]; do
    all+=("$1")
    shift
  done
  shift
  "${pip[@]}" "$torch"
  "${pip[@]}" "$torch" "${all[@]}"
  "${pip[@]}" --no-deps "$@"
  touch "$peers/$name/made"
}

environments() {
  environment speculators 'transformers>=5.0,<=5.19' accelerate 'datasets>=4,<=5.1' 'tqdm<=4.70.1' 'numpy<=2.4.6' aiohttp \
    click httpx huggingface-hub 'loguru<=0.7.3' 'openai>=2' protobuf psutil pydantic pydantic-settings rich safetensors \
    typer tensorboard -- speculators==0.9.0 hs-connectors==0.9.0
  environment specforge transformers==5.8.1 'numpy<=2.4.6' datasets tqdm accelerate pydantic psutil pyyaml safetensors \
    requests tensorboard openai-harmony yunchang -- specforge==0.2.0 triton
}

# train_speculators RATE: the head of the paper, without the norms and the window that are its default; goes on from
# the checkpoints in out/
train_speculators() {
  local all
  all=$(find "$dir/speculators/hidden_states" -name 'hs_*.safetensors' | wc -l)
  "$peers/speculators/bin/python" "$here/watch.py" watch.json "$threads" "$here/run_speculators.py" \
    --verifier-name-or-path "$dir/backbone" --speculator-type eagle3 --draft-arch llama --num-layers 1 \
    --target-layer-ids 2 15 27 --draft-vocab-size 4096 --d2t-path "$dir/d2t.npy" --t2d-path "$dir/t2d.npy" \
    --no-norm-before-residual --no-norm-before-fc --no-norm-output --full-attention-indices 0 \
    --data-path "$dir/speculators/data" \
    --hidden-states-path "$dir/speculators/hidden_states" --on-missing raise --num-workers 0 --total-seq-len $((step * length)) \
    --train-data-ratio "$(awk "BEGIN { printf \"%.6f\", ($all - 0.5) / $all }")" --draft-attn-impl sdpa \
    --loss-implementation eager --ttt-steps 3 --ttt-step-loss-decay 0.8 --optimizer adamw --lr "$1" --weight-decay 0 \
    --scheduler-type cosine --scheduler-warmup-ratio 0.1 --epochs "$epochs" \
    --checkpoint-freq "$([ "$kept" -gt 0 ] && awk "BEGIN { printf \"%.4f\", 1 / $kept }" || echo 1)" \
    --log-freq 1000000 --save-path out --log-dir logs
}

# train_specforge RATE: with its lean teacher, and sdpa, as its default attention is for GPUs; goes on from out/
train_specforge() {
  local all resume= every=0
  all=$(find "$dir/specforge" -name '*.ckpt' | wc -l)
  [ ! -e out/compare-latest ] || resume=", resume_from: $PWD/out/compare-latest"
  [ "$kept" -eq 0 ] || every=$((all / rows / kept > 0 ? all / rows / kept : 1))
  cat >run.yaml <<END
model: {target_model_path: $dir/backbone, draft_model_config: $dir/specforge.json, vocab_mapping_path: $dir/maps.pt}
data: {hidden_states_path: $dir/specforge, max_length: $length, dataloader_num_workers: 0, cache_dir: $PWD/cache}
training: {strategy: eagle3, num_epochs: $epochs, batch_size: $rows, fsdp_sharding: NO_SHARD, learning_rate: $1,
  warmup_ratio: 0.1, ttt_length: 3, attention_backend: sdpa, compact_teacher: true, save_interval: $every,
  max_checkpoints: 2$resume}
output_dir: $PWD/out
run_id: compare
END
  SPECFORGE_DEVICE=cpu "$peers/specforge/bin/python" "$here/watch.py" watch.json "$threads" "$here/run_specforge.py" \
    train --config run.yaml
}
