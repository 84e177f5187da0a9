# shellcheck shell=bash
# What the job scripts share. Sourced on the host by the batch step; nothing in it runs inside the container.
#
# Settings, all optional, from the environment of `sbatch`; `megatron-kd submit` sets them from its options:
#   MEGATRON_KD_HOME       the clone; default: where sbatch was called
#   MEGATRON_KD_COMMAND    what starts megatron-kd; default: the clone's .venv/bin/megatron-kd, else `megatron-kd`
#   MEGATRON_KD_CONTAINER  image for pyxis, a .sqsh file or registry#name:tag; default: no container
#   MEGATRON_KD_MOUNTS     further HOST:CONTAINER pairs with commas between; clone and run folder are mounted anyway
#   MEGATRON_KD_SRUN_ARGS  further options of srun, one a line
#   MEGATRON_KD_CPU        1: CPU ranks over gloo instead of GPUs, to try a cluster and its scripts with a small model
# Tokens of the hub and of loggers are exported by whoever submits (HF_TOKEN, WANDB_API_KEY, ...). Slurm hands them to
# the tasks by name; no script prints or saves their values.

: "${kd_home:?}" # the clone, set by the script that sources this

kd_fail() { # MESSAGE...: one line, and the exit status of what the user can mend
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

kd_say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }

kd_option() { # NAME ARGUMENT...: prints the value of the last --name VALUE or --name=VALUE
    local name=$1 value=""
    shift
    while (($#)); do
        case $1 in
        "$name")
            (($# > 1)) || kd_fail "$name needs a value."
            value=$2
            shift
            ;;
        "$name="*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

kd_count_tasks() { # the job's tasks, of all nodes and of one
    kd_tasks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}
    export KD_TASKS_PER_NODE=$((kd_tasks / SLURM_JOB_NUM_NODES)) OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

kd_open_logs() { # FOLDER ARGUMENT...: from here on the log is FOLDER/NAME_JOB.out; what the job is stands beside it
    local folder=$1 log
    shift
    mkdir -p -- "$folder" || kd_fail "$folder cannot be made. Choose a folder on a file system that every node sees."
    folder=$(realpath -- "$folder")
    log=$folder/${SLURM_JOB_NAME}_${SLURM_JOB_ID}
    if [[ ! $log.out -ef /proc/self/fd/1 ]]; then
        echo "The log goes on in $log.out"
        exec >>"$log.out" 2>&1
    fi
    ln -sfn -- "${log##*/}.out" "$folder/latest"
    kd_say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start ${SLURM_RESTART_COUNT:-0} after the first"
    kd_commit >"$log.commit"
    head -n 1 -- "$log.commit"
    printf '%q ' "${0##*/}" "$@" >"$log.command"
    kd_environment >"$log.env"
}

kd_commit() { # the clone's commit, and what differs from it
    if git -C "$kd_home" rev-parse --verify --quiet HEAD >/dev/null 2>&1; then
        echo "commit $(git -C "$kd_home" rev-parse HEAD)$(git -C "$kd_home" diff --quiet HEAD -- || echo ', changed')"
        git -C "$kd_home" diff HEAD --
    else
        echo "commit unknown: $kd_home is no git clone"
    fi
}

kd_environment() { # variables that a run depends on with their values, all others by name alone
    local name
    while IFS= read -r name; do
        case $name in
        *TOKEN* | *SECRET* | *PASS* | *KEY* | *CRED* | *AUTH* | *JWT*) echo "$name (not saved)" ;;
        SLURM_* | MEGATRON_KD_* | NCCL_* | CUDA_* | TORCH* | PYTORCH_* | NVTE_* | UCX_* | GLOO_* | OMP_* | MASTER_*) ;&
        HF_HOME | HF_HUB_OFFLINE | PATH | LD_LIBRARY_PATH | PYTHONPATH | VIRTUAL_ENV | LANG) echo "$name=${!name@Q}" ;;
        *) echo "$name (not saved)" ;;
        esac
    done < <(compgen -e | sort)
}

kd_rendezvous() { # where the ranks meet: the first node, by the address that Slurm itself reaches it at
    local first address
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | head -n 1)
    export MASTER_ADDR=${MASTER_ADDR:-${address#*=}}
    export MASTER_PORT=${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 10000))}
    if [[ ${MEGATRON_KD_CPU:-0} != 1 ]]; then
        export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
        export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    fi
}

kd_prepare_srun() { # FOLDER: fills kd_srun (srun and its options) and kd_command (what starts megatron-kd)
    local extra
    kd_srun=(srun --kill-on-bad-exit=1 --label)
    if [[ -n ${MEGATRON_KD_CONTAINER:-} ]]; then
        kd_srun+=(--container-image="$MEGATRON_KD_CONTAINER" --no-container-mount-home --container-workdir="$kd_home")
        kd_srun+=(--container-mounts="$kd_home:$kd_home,$1:$1${MEGATRON_KD_MOUNTS:+,$MEGATRON_KD_MOUNTS}")
    fi
    while IFS= read -r extra; do
        [[ -z $extra ]] || kd_srun+=("$extra")
    done <<<"${MEGATRON_KD_SRUN_ARGS:-}"
    kd_command=("${MEGATRON_KD_COMMAND:-megatron-kd}")
    if [[ -z ${MEGATRON_KD_COMMAND:-}${MEGATRON_KD_CONTAINER:-} && -x $kd_home/.venv/bin/megatron-kd ]]; then
        kd_command=("$kd_home/.venv/bin/megatron-kd")
    fi
    if [[ -z ${MEGATRON_KD_CONTAINER:-} ]] && ! command -v -- "${kd_command[0]}" >/dev/null; then
        kd_fail "${kd_command[0]} is not on this node. Set MEGATRON_KD_COMMAND to its path, or MEGATRON_KD_CONTAINER."
    fi
}

set -E
trap 'kd_say "${0##*/} broke at line $LINENO: $BASH_COMMAND"' ERR

kd_interrupted="" kd_time_is_up="" kd_cancelled=""
trap 'kd_interrupted=1 kd_time_is_up=1; kd_say "the time limit is near"; kd_terminate' USR1
trap 'kd_interrupted=1 kd_cancelled=1; kd_terminate --quiet' TERM # of scancel the tasks have it already

kd_terminate() { # [OPTION OF SCANCEL]: SIGTERM to the tasks of every running step, none to this script
    scancel "$@" --signal=TERM "$SLURM_JOB_ID" || true
}

kd_run() { # COMMAND...: its exit status. Traps run meanwhile; each ends one `wait`, not the command.
    local pid status=127 last
    "$@" &
    pid=$!
    while :; do
        kd_interrupted="" last=0
        wait "$pid" || last=$?
        ((last == 127)) || status=$last # 127: it had been waited for already
        [[ -n $kd_interrupted ]] || return "$status"
    done
}

kd_go_on_or_stop() { # STATUS BEFORE AFTER WHAT: what comes after a try that did not finish; does not return
    local status=$1 before=$2 after=$3 what=$4
    if ((status == 2)); then
        kd_say "stopped: the message above says what to mend. Not requeued."
        exit 2
    fi
    if [[ -n $kd_cancelled ]] || { [[ -z $kd_time_is_up ]] && ((status == 0)); }; then
        kd_say "stopped by a signal at $after $what. The same command goes on from there."
        exit 143
    fi
    if ((after > before)); then
        kd_say "requeued to go on from $after $what (exit status $status)"
        scontrol requeue "$SLURM_JOB_ID"
        sleep 600 || true # Slurm ends this script when the job is back in the queue
        exit 0
    fi
    kd_say "failed with exit status $status and nothing new since $before $what, so a new try would fare no better." \
        "Not requeued; the log above says why."
    exit $((status > 0 ? status : 1))
}
