# The rows of the paper's Tables 1 and 2, and of growth by copies against growth by splits. Sourced after settings.sh.
# shellcheck shell=bash

# Table 1: Ens 4@2, i.i.d. on the first k mega-batches against the sequential learner after k of them (Ens_w1).
table1_rows() {
  local size seed
  table table1
  for size in $SIZES; do
    for seed in $(seeds_of "$size"); do
      row ens-4@2-w1 "$size" "$seed" 1 4 --learner ens --num-members 2
      row ens-4@2-iid3 "$size" "$seed" 1 4 --learner ens --num-members 2 --iid 3
      row ens-4@2-iid4 "$size" "$seed" 1 4 --learner ens --num-members 2 --iid 4
    done
  done
}

# Table 2: what the findings rest on with all seeds, the rest with the first.
table2_rows() {
  local size seed experts
  table table2
  for size in $SIZES; do
    for seed in $(seeds_of "$size"); do
      for experts in 4 8 12; do row "sm-$experts-w1" "$size" "$seed" 1 "$experts" --learner sm; done
      row ens-4@2-w1 "$size" "$seed" 1 4 --learner ens --num-members 2
      row gens-w1 "$size" "$seed" 1 4 --learner gens
      row gmoe-copy-w1 "$size" "$seed" 1 - --learner gmoe --grow-schedule 4,6,8,12
    done
    seed=$(first_seed_of "$size")
    row sm-8-w3 "$size" "$seed" 1 8 --learner sm --wait 3 --drop-rest
    row sm-8-w3-x3 "$size" "$seed" 3 8 --learner sm --wait 3 --drop-rest
    row sm-12-w4 "$size" "$seed" 1 12 --learner sm --wait 4
    row sm-12-w4-x4 "$size" "$seed" 4 12 --learner sm --wait 4
    row ens-4@4-w1 "$size" "$seed" 1 4 --learner ens --num-members 4
    row ens-4@2-w3 "$size" "$seed" 1 4 --learner ens --num-members 2 --wait 3 --drop-rest
    row ens-4@2-w3-x3 "$size" "$seed" 3 4 --learner ens --num-members 2 --wait 3 --drop-rest
    row ens-4@2-w4 "$size" "$seed" 1 4 --learner ens --num-members 2 --wait 4
    row ens-4@2-w4-x4 "$size" "$seed" 4 4 --learner ens --num-members 2 --wait 4
  done
}

# Growth by copies (the paper's) and by splits (smooth), the same experts at the same time; SM_w1 with 12 starts larger.
growth_rows() {
  local size seed
  table growth
  for size in $SIZES; do
    for seed in $(seeds_of "$size"); do
      row sm-12-w1 "$size" "$seed" 1 12 --learner sm
      row gmoe-copy-w1 "$size" "$seed" 1 - --learner gmoe --grow-schedule 4,6,8,12
      row gmoe-split-w1 "$size" "$seed" 1 - --learner gmoe --grow-schedule 4,6,8,12 --grow-method split
    done
  done
}
