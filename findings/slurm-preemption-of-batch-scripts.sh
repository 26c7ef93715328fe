#!/usr/bin/env bash
# Slurm 22.05.8 (Debian 12): a script that is preempted is told so at the end of GraceTime.
#
# One would guess: a job with --signal=B:TERM@120 that is preempted gets SIGTERM when its GraceTime
# begins. "The job's tasks are immediately sent SIGCONT and SIGTERM signals" (slurm.conf, GraceTime).
# What is seen: the batch script is none of these tasks. It gets SIGTERM when GraceTime is over, KillWait
# seconds before SIGKILL. With SlurmctldParameters=preempt_send_user_signal it gets it at once.
# Where it matters: commands/slurm/verdict.py tells a job itself that its time is over soon.
#
# It needs root, Debian 12 and its mirror, and exits with 0 as long as it is so.
set -euo pipefail

VERSION=22.05.8-4+deb12u3
GRACE=8
folder=$(mktemp -d /tmp/slurm-XXXXXX)
chmod 755 "$folder"
trap 'kill $(jobs -p) 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
mkdir debs root state
needed=$(apt-get install --simulate -qq --no-install-recommends \
  "slurmctld=$VERSION" "slurmd=$VERSION" "slurm-client=$VERSION" munge | sed -n 's/^Inst \([^ ]*\).*/\1/p')
(cd debs && apt-get download -qq $needed "slurmctld=$VERSION" "slurmd=$VERSION" "slurm-client=$VERSION" munge)
for each in debs/*.deb; do dpkg -x "$each" root; done
libraries=$folder/root/usr/lib/$(uname -m)-linux-gnu
export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm SLURM_CONF=$folder/slurm.conf
export PATH=$folder/root/usr/bin:$folder/root/usr/sbin:$PATH

head -c 64 /dev/urandom > munge.key
chmod 400 munge.key
munged --foreground --force --socket=munge.sock --key-file="$folder/munge.key" --pid-file="$folder/pid" \
  --log-file="$folder/munge.txt" --seed-file="$folder/seed" 2>/dev/null &

# Seconds from the preemption of a job to the SIGTERM of its script, with these SlurmctldParameters.
seconds_until_told() {
  host=$(hostname -s)
  cat > slurm.conf <<CONFIGURATION
ClusterName=finding
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17817
SlurmUser=root
AuthInfo=socket=$folder/munge.sock
PluginDir=$libraries/slurm-wlm
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1
SlurmdParameters=config_overrides
$1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=4
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17821 CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=$GRACE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off
CONFIGURATION
  slurmctld-wlm -D -c 2>/dev/null & controller=$!
  slurmd-wlm -D -N node1 -d "$folder/root/usr/sbin/slurmstepd-wlm" 2>/dev/null & node=$!
  until sinfo --noheader --format=%t 2>/dev/null | grep -q idle; do sleep 0.5; done
  rm -f told begun
  sbatch --no-requeue --signal=B:TERM@120 --time=60 --output=/dev/null >/dev/null <<SCRIPT
#!/bin/sh
trap 'date +%s > $folder/told' TERM
touch $folder/begun
while sleep 0.2; do :; done
SCRIPT
  until [ -e begun ]; do sleep 0.2; done
  begin=$(date +%s)
  sbatch --partition=high --output=/dev/null --wrap="sleep 1" >/dev/null
  until [ -e told ]; do sleep 0.2; done
  echo $(($(cat told) - begin))
  scancel --user=root
  sleep 6
  kill $controller $node
  wait $controller $node 2>/dev/null || true
}

seconds_until_told "" > without
seconds_until_told "SlurmctldParameters=preempt_send_user_signal" > with
echo "told after $(cat without) s, with preempt_send_user_signal after $(cat with) s, GraceTime is $GRACE s"
[ "$(cat without)" -ge "$GRACE" ] && [ "$(cat with)" -lt "$((GRACE - 2))" ]
