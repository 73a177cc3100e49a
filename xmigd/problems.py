"""What each error code means and what to do about it. `docs/errors.md` shows this; a test compares it with the code."""

from __future__ import annotations

# code: (what it means, what to do)
PROBLEMS: dict[str, tuple[str, str]] = {
    "admin_token_of_user": ("A token of scope admin is the node's, nobody's own.", "Leave out `uid`."),
    "already_moving": ("The process is being moved or suspended already.", "Wait for that, or cancel it."),
    "already_running": ("Another xmigd has this runtime directory.", "Use that one, or set `XMIG_RUNTIME_DIR`."),
    "answer_not_kept": (
        "The request was done; its answer held a secret, which is not kept.",
        "Ask for a new one, with a new `Idempotency-Key`.",
    ),
    "bad_ca_file": ("The file of `--ca-file` cannot be read as certificates.", "Name a PEM file."),
    "bad_key": (
        "The key of an exported checkpoint is missing, or not a key, or not the one; or the file is not encrypted.",
        "Name the key with which it was exported; leave it out if the file is not encrypted and you trust it.",
    ),
    "bad_snapshot": (
        "What arrived at the target is not what the source's snapshot says.",
        "Ask again; if it comes back, report it.",
    ),
    "bad_idempotency_key": (
        "`Idempotency-Key` is empty, too long, or not printable.",
        "Send up to 255 printable ASCII characters without spaces.",
    ),
    "bad_token": (
        "The token is not valid: mistyped, revoked, or of another node.",
        "Ask for another one.",
    ),
    "bad_cursor": (
        "The cursor of a list is not one, or of a list in another order.",
        "Send it as it was in `Link`; leave it out to begin again.",
    ),
    "bad_url": ("The address of `--url` is none.", "Write `https://HOST:PORT`."),
    "breaker_open": ("The circuit breaker is open: automation leaves things alone.",
                     "Find out why so much happened, then `POST /v1/circuit-breaker:reset`."),
    "cancelled": ("The operation ended because somebody cancelled it.", "Nothing: what it was about is as before."),
    "cannot_start": ("xmigd cannot start.", "Do what the message says."),
    "checkpoints_full": (
        "The folder of checkpoints would become larger than `checkpoint_mib` allows. The job was not stopped.",
        "Remove checkpoints that nobody needs, or raise the setting.",
    ),
    "conflict": ("Not possible in this state.", "Look at the state, and ask again when it has changed."),
    "consolidation_failed": (
        "A move of the plan failed; the moves before it were undone.",
        "The text names the cause; make a new plan when it is gone.",
    ),
    "consolidation_incomplete": (
        "The plan was given up, and not every move could be undone.",
        "The text says where each process runs; `xmigctl migrate` moves it, or a new plan does.",
    ),
    "connections_full": (
        "All connections that there may be are taken, by several users.",
        "Try again; raise `connections` if there are descriptors for more.",
    ),
    "continued_already": (
        "The job was restored from the checkpoint that its preemption left, and goes on as another job.",
        "Nothing: the message names that job.",
    ),
    "cordoned": ("The target takes no new process.", "Choose another target, or uncordon it."),
    "criu_failed": (
        "CRIU could not dump or restore the program, which is as it was.",
        "`xmigctl check-movable` says what stands in the way.",
    ),
    "criu_missing": (
        "CRIU 4 or later is not there, or this daemon may not use it.",
        "`dnf install criu`, or set `XMIG_CRIU`; run xmigd as root.",
    ),
    "damaged": (
        "Something that was kept is not what was put there: truncated, changed, or gone.",
        "Use an older one, and look at the disk: nothing of it was used.",
    ),
    "device_cordoned": ("The device takes no new process.", "Choose another one, or uncordon it."),
    "disk_full": ("The disk of the database is full. Nothing was changed; jobs go on.", "Make room, then ask again."),
    "downtime": (
        "The program would stand still for longer than `max_downtime_ms` allows.",
        "Allow more, or move it when it changes less memory.",
    ),
    "cursor_expired": (
        "The order of a list is not remembered any more: by state and memory that is for 10 minutes.",
        "Begin again without `cursor`; with `sort=created` and `sort=name` a cursor never expires.",
    ),
    "deadline_exceeded": (
        "It was not done at the deadline, and what was begun is taken back: the job goes on where it was.",
        "Ask again with a longer deadline.",
    ),
    "drain_incomplete": (
        "Not every process could be moved off the device, which stays cordoned.",
        "Make room elsewhere and drain again.",
    ),
    "driver_too_old": ("NVIDIA's driver has no checkpoints, or none that go to another GPU.", "Driver 580 or newer."),
    "driver_unusable": ("NVIDIA's driver does not answer, or cannot be initialised.", "`xmigctl doctor`."),
    "etcd_unreachable": (
        "No endpoint of etcd answers, so no lease can be had or checked. The program stays where it is.",
        "`etcdctl endpoint health`; check the settings `etcd_*`.",
    ),
    "etcd_wrong": (
        "What answers at `etcd_endpoints` does not answer as etcd does.",
        "Check the addresses; etcd has to be 3.4 or newer, with its JSON gateway.",
    ),
    "exists": ("A checkpoint with this id is here already.", "Nothing."),
    "file_changed": (
        "A file that the program had open has another size or owner than it had, or a link leads to another one.",
        "Bring it back; a log is truncated to the size that the message names.",
    ),
    "file_in_use": (
        "A job that runs writes to a file that the restored program would write to, too.",
        "End that job, or restore with `--own-files`.",
    ),
    "file_not_copied": (
        "A file that the program writes to could not be copied beside itself, with its user's rights.",
        "Make room, or let the program's user write to the folder; or restore without `--own-files`.",
    ),
    "file_missing": (
        "A file that the program had open is gone.",
        "Put it where it was.",
    ),
    "fleet_stopped": (
        "A move of a plan over nodes failed, and the plan stopped there. What was moved stays where it is.",
        "The text names the cause; make a new plan when it is gone.",
    ),
    "job_changed": (
        "Processes of the job began or ended while it was moved to another node or written down.",
        "Ask for it again, once all of them run; the job goes on where it was.",
    ),
    "job_over": ("The job is over, and was requested to be predicted.", "`xmigctl job show` says how long it took."),
    "job_stays": (
        "Another process of its job cannot move: a job moves whole or not at all.",
        "Look at why that one cannot.",
    ),
    "lease_lost": (
        "The lease under which a job moves to another node was lost before the point of no return. The program stays.",
        "Look at etcd, and make a new plan.",
    ),
    "lease_required": (
        "The node moves jobs under leases only, and the order came without one.",
        "Set `etcd_endpoints` on the node that gives orders, too.",
    ),
    "lease_taken": (
        "Somebody else has the job's lease: another controller moves it.",
        "Try again when that is over.",
    ),
    "no_order": ("No order of a plan's moves has room for the process at every moment.", "Make room on a device."),
    "no_such_transfer": ("The peer knows no such transfer.", "`xmigctl transfer list`, on both nodes."),
    "not_movable": (
        "Something that the program has open or mapped cannot be restored.",
        "`xmigctl check-movable` lists what, and what to do.",
    ),
    "not_prepared": (
        "The other node could not make the program again; the message says why.",
        "Do what it says; the program goes on where it was.",
    ),
    "order_refused": (
        "An order has the id of another operation, or names several processes for devices of their own node.",
        "Make a new plan.",
    ),
    "order_superseded": (
        "A later order for the same job was given, so this one is refused.",
        "Make a new plan.",
    ),
    "other_cpu": (
        "The other node's CPU lacks instructions that this one has, and that the program may use.",
        "Choose a node with the same CPU.",
    ),
    "other_version": (
        "The checkpoint was made by a version of xMIG with other memory, or exported in a later format.",
        "Restore it with that version.",
    ),
    "peer_lies": (
        "What a peer has sent is not what it announced.",
        "Look at that node; remove it with `xmigctl peer rm` if it is not to be trusted.",
    ),
    "peer_not_allowed": (
        "The other node takes no programs from this one.",
        "There, name this node in `programs_from`.",
    ),
    "peer_unreachable": (
        "A peer does not answer, or the connection to it was lost.",
        "`xmigctl peer list` says why; ask again when it is connected.",
    ),
    "address_in_use": (
        "A connection that the program would have again is somebody's now.",
        "End what has it; the message names its addresses.",
    ),
    "address_missing": (
        "The program has sockets at an address that this node does not have.",
        "Choose the node that has this address. Those of a job of `xmigctl run --movable` go with it.",
    ),
    "mount_missing": (
        "A job of `xmigctl run --movable` has a mount of its machine's, and here nothing is mounted at that path.",
        "Mount it; or unmount it where the job was, and start that anew.",
    ),
    "job_network_failed": (
        "The network of a job of several nodes could not be made on this node, or its process has ended.",
        "xmigd needs root and `/dev/net/tun` (`modprobe tun`); if the process was killed, stop the job, and start it "
        "again or restore it.",
    ),
    "job_network_in_use": (
        "The addresses of jobs' networks are others' on this node, or another job has the same name, nodes and user.",
        "Set `job_network` to a range to which no node has a route, the same on each; or give the job another name.",
    ),
    "packets_not_held": (
        "What comes for connections between nodes could not be held while their ends were written down or restored.",
        "xmigd needs root, and the kernel nf_tables (Linux 5.12 or later); then ask for it again.",
    ),
    "port_in_use": ("A port that is to be published is taken, or cannot be passed on.", "Name another one."),
    "pid_in_use": (
        "Another process has the number that the program has to have again.",
        "End it, or wait for its end; jobs of `xmigctl run --movable` need no number.",
    ),
    "no_snapshot": (
        "No snapshot of the process is possible at the moment: its device waits for the program, or there is no room.",
        "Ask again later; the job's log says why.",
    ),
    "nothing_named": (
        "A lossy checkpoint rounds what programs have named as optimizer state, and nothing is named.",
        "Start the job with `xmigctl run --lossy-optimizer-state`, and wait for its first step; or make an exact one.",
    ),
    "not_copied": (
        "The content of the process's snapshot was not copied to host memory.", "Ask again; its message says why.",
    ),
    "resumed_meanwhile": ("Somebody resumed the process while its checkpoint was made.", "Ask for it again."),
    "several_devices": (
        "A process with several devices is not packed with others.",
        "Nothing: it stays where it is. `xmigctl migrate` moves it.",
    ),
    "several_nodes": (
        "A rank of a job of several nodes does not go to another node, and is not suspended before it has a "
        "communicator.",
        "Suspend the job once its ranks communicate; `xmigctl migrate PROCESS` moves a rank within its node. To move "
        "it to another node, make a checkpoint with `--stop` at its first node.",
    ),
    "other_node_leads": (
        "Of a job with ranks on several nodes, checkpoints are made, restored and removed at its first node.",
        "Request it there; the message names the node.",
    ),
    "no_common_snapshot": (
        "The ranks of a job on several nodes did not stop at one group snapshot, so there is no checkpoint of them.",
        "Ask again once all of them have a communicator in common.",
    ),
    "connection_lost": (
        "A connection between nodes ended while its job was restored. Nothing of the job is left.",
        "Look at the network between the nodes, and restore the checkpoint again.",
    ),
    "no_such_part": (
        "The part of a checkpoint of several nodes is not where it is to be restored.",
        "Import an export of it there, or set `checkpoint_mirror` on all nodes.",
    ),
    "in_doubt": (
        "Only the job's first node, which is not in reach, knows whether it is a checkpoint. The part here is kept.",
        "Bring that node back: the part is listed then, or removed. Gone for good: xmigctl checkpoint discard.",
    ),
    "no_part": (
        "A node has no job of that name with ranks there, or several.",
        "Start the job on all of its nodes, once on each.",
    ),
    "ends_soon": (
        "The job ends within `least_remaining_s`, as its predicted P90 says.",
        "Leave it, or plan with a smaller `least_remaining_s`.",
    ),
    "engine_not_possible": ("This engine cannot move this process.", "Leave `engine` out."),
    "exclusive": ("The GPU is in exclusive mode.", "`nvidia-smi -c DEFAULT`."),
    "failed": ("A server could not do its part of the move.", "Its text says why."),
    "failing": ("The target's device does not answer as it should.", "Look at `GET /v1/devices`."),
    "file_system_full": (
        "There is no room for a suspended process's files, or for a checkpoint.",
        "Make room; suspend to host memory; remove checkpoints that nobody needs.",
    ),
    "forbidden": ("Whoever calls may not do this.", "Ask an operator."),
    "group_refused": (
        "Ranks that share communicators are suspended and resumed as one, and another one could not, or not in time.",
        "The error says why. All ranks are where they were: try again.",
    ),
    "helper_failed": ("The helper that calls NVIDIA's driver does not start.", "Read xmigd's log."),
    "helper_lost": ("The helper that calls NVIDIA's driver died during a call.", "Ask again."),
    "idempotency_key_reused": (
        "This `Idempotency-Key` was used for another request.",
        "Take a new key for every other request.",
    ),
    "insecure": ("A token would be sent where others can read it.", "Use `https://`."),
    "internal": ("Something failed inside xmigd.", "Read its log, and report it."),
    "interrupted": ("xmigd ended in the middle of the operation, which had no effect that stays.", "Ask for it again."),
    "invalid": ("The request is not understood: a field is missing, unknown or wrong.", "Correct the field it names."),
    "ipc": ("The program shares device memory with other processes.", "Driver 610, or run it under xMIG."),
    "lost": ("The connection to the daemon broke before it answered.", "Look whether it was done; then ask again."),
    "managed_memory": ("The program uses managed memory, which the driver's checkpoints do not save.", "Let it end."),
    "mig": ("The GPU is in MIG mode, in which the driver's checkpoints fail.", "Choose another GPU."),
    "mps": ("The program runs under MPS, which the driver's checkpoints do not support.", "Run it without MPS."),
    "native_missing": (
        "The native programs are not where they should be.",
        "Build them (`make build`), or set `XMIG_NATIVE_DIR`.",
    ),
    "needs_user": (
        "A job belongs to a user, and the token to none.",
        "Use the local socket, or a token that was made for a user.",
    ),
    "no_cuda": ("The program uses no GPU of this node.", "Name another pid."),
    "no_daemon": ("No xmigd answers.", "Start it, or say where it is: `XMIG_RUNTIME_DIR`, `--url`."),
    "no_descriptors": ("The daemon has no descriptors left to hold memory.", "Raise `LimitNOFILE`."),
    "no_host_memory": ("Its device memory does not fit into the host's.", "Free host memory."),
    "no_peer": ("The target's device cannot reach the source's memory.", "Suspend the process and resume it there."),
    "no_room": ("The target has too little memory.", "Choose another target, or make room there."),
    "no_such_device": (
        "This node has no such device, or the settings do not name it.",
        "`xmigctl doctor` and `XMIG_DEVICES`.",
    ),
    "gone": ("It was there, and is not kept any more.", "Begin again."),
    "no_such_user": ("This node has no user of that name.", "Write the name as this node has it, or the number."),
    "no_trace": (
        "The job's servers are of a version that writes no traces.",
        "Move the job, or let a standby take over: the next server does.",
    ),
    "not_found": ("There is no such thing, or not for this caller.", "List what there is."),
    "not_http": (
        "What arrived at a socket is no request of HTTP/1.1, or has too many headers.",
        "Send one Host, and no Upgrade with a body; to a socket with TLS, speak TLS.",
    ),
    "not_json": ("The body is not JSON.", "Send JSON, with `Content-Type: application/json`."),
    "not_over": ("The operation goes on; the command did not wait for its end.", "`xmigctl op watch` follows it."),
    "class_not_granted": (
        "The user may not start jobs of the class critical.",
        "Start it as normal, or have an operator add the user to XMIG_CRITICAL_USERS.",
    ),
    "quota_too_large": (
        "The memory quota is more than a device has.", "Name less, or another device: `xmigctl device list`.",
    ),
    "no_mps": (
        "A share of multiprocessors is for a device that is shared through MPS.",
        "Leave the share out, or name the device in `XMIG_MPS_DEVICES`.",
    ),
    "too_small": (
        "The target has less memory than the program's quota.", "Choose another target.",
    ),
    "quota_full": (
        "The job's other programs leave too little of its memory quota on the target.",
        "Choose another target, or let one of them give memory back.",
    ),
    "not_admitted": (
        "No device has the memory that the job reserves: what is neither used nor reserved is less.",
        "Wait for room, reserve less, or preempt jobs; the message says what is free.",
    ),
    "not_preempted": (
        "The job cannot be preempted in the way that was requested, or, to continue, was not.",
        "Do what the reasons in the message say, or end the job.",
    ),
    "not_protected": (
        "A process of a strict job had the genuine driver, and the job was ended.",
        "`xmigctl logs JOB` names it: start it with the job's environment, or leave `--strict` out.",
    ),
    "not_ready": (
        "xmigd lives and does not take new work yet, or not any more, or cannot record it.",
        "Its text says what it waits for; jobs go on.",
    ),
    "not_recorded": (
        "The database does not take the record without which nothing is handed over.",
        "Make room on its disk.",
    ),
    "not_running": ("The process is not in a state from which it can be moved.", "Ask again when it runs."),
    "not_suspended": ("The program is not suspended, or not by xMIG.", "`xmigctl ps` shows where it is."),
    "nothing_to_undo": (
        "The consolidation plan was not applied here, is being applied or was undone already, or all that it moved has "
        "ended.",
        "`xmigctl op list --kind consolidation` has what there was.",
    ),
    "operation_over": ("The operation has ended already.", "Look at its result."),
    "operation_under_way": ("Another operation works at the same subject.", "Wait for it, or cancel it."),
    "operators_only": (
        "Only operators may do this: root, the daemon's user, the operators' group, tokens of scope admin.",
        "Ask an operator.",
    ),
    "other_kind": ("The target is a device of another kind.", "Choose one of the same kind."),
    "outcome_unknown": (
        "xmigd ended while it did the first request with this `Idempotency-Key`, which had begun no operation.",
        "Look whether it was done; if not, send it with a new key.",
    ),
    "not_of_the_device": ("The Xid is of a program, or says nothing by itself.", "Nothing: its program is recovered."),
    "paused": ("The process is paused.", "Let it continue first."),
    "peer_exists": ("A peer has this name or fingerprint already.", "Remove it first: `xmigctl peer rm NAME`."),
    "plan_empty": ("The consolidation plan moves nothing.", "Its refusals say what stays, and why."),
    "plan_stale": (
        "The node has changed since the consolidation plan was made or applied: a job ended, came or moved, a device "
        "failed or has no room.",
        "Make a new plan.",
    ),
    "pool_too_small": ("The host has too little memory for a suspended process.", "Make room, or suspend to files."),
    "precondition_required": (
        "A change needs `If-Match`, so that it undoes nobody else's.",
        "GET it first, and send its `ETag`.",
    ),
    "process_ended": ("The program has ended meanwhile.", "Nothing."),
    "process_lost": ("NVIDIA's driver cannot give the program back.", "Start it again."),
    "program_exited": ("The program has exited.", "Nothing."),
    "process_not_readable": (
        "The daemon may not read what a program has open and mapped.",
        "Run xmigd as root, or with `CAP_SYS_PTRACE` and `CAP_CHECKPOINT_RESTORE`.",
    ),
    "protocol": (
        "A program or server sent what the protocol does not allow; its connection was ended.",
        "Install shim, server and daemon from one version.",
    ),
    "read_only": ("This caller may only read.", "Use the local socket, or a token of scope operate."),
    "request_timeout": (
        "A request was not here within `request_timeout`, or a connection was opened and nothing was requested.",
        "Send headers and body without a pause.",
    ),
    "scheduled": (
        "A drain does not move a job to another node that a scheduler has started: it would be over for that. Of "
        "Slurm's, nothing does; nor do moves and packings take jobs of Slurm and Kubernetes to devices outside of "
        "their allocation.",
        "Let the scheduler move it, or do it by hand: `xmigctl migrate JOB --to NODE` if it is not Slurm's; within the "
        "node `xmigctl migrate` or `resume` with --leave-allocation, which a drain does by itself.",
    ),
    "same_device": ("The process is on the target already.", "Choose another one."),
    "scope_too_small": ("The token's scope does not allow it.", "Use a token of a larger scope."),
    "several_gpus": ("The program uses several GPUs, and the driver's checkpoints move programs with one.", "Run it "
                     "under xMIG."),
    "several_processes": (
        "The job's processes do not descend from one of the job, or its ranks share communicators with other jobs.",
        "Start them with one launcher under `xmigctl run`, such as torchrun.",
    ),
    "source_lost": (
        "The server that had the program died before it had handed over.",
        "Nothing: the program was recovered where it was. Ask again.",
    ),
    "source_refused": ("The server that has the program cannot stop there now.", "Its text says why."),
    "stale": ("It has changed since it was read.", "GET it again, and decide again."),
    "stays_checkpointed": ("There was no room to restore the program, so it is in the host's memory.", "Make room on a "
                           "GPU, then `xmigctl resume`."),
    "stays_locked": ("NVIDIA's driver does not unlock the program.", "Read the kernel's log; the program may have to "
                     "be killed."),
    "still_running": ("The first request with this `Idempotency-Key` is still being done.", "Send it again later."),
    "store_failed": ("A checkpoint could not be written or read: no room, or no descriptors.", "Make room, ask again."),
    "suspended": ("The process is suspended.", "Resume it, on any device."),
    "target_fault": ("The target's device faulted while it took the process over.", "Look at that device."),
    "target_lost": ("The target died.", "Look at its device, then ask again."),
    "timeout": ("A step made no progress in time.", "Look at the log of xmigd; ask again."),
    "token_expired": ("The token has expired.", "Ask for another one."),
    "token_from_token": ("A token makes no tokens, unless it is of scope admin.", "Use the local socket."),
    "token_required": (
        "Over TCP one needs a token.",
        "Send `Authorization: Bearer ...`; `POST /v1/tokens` makes one.",
    ),
    "too_large": ("The body is larger than any request needs.", "Send less than 64 KiB."),
    "too_late_to_cancel": ("The operation is past its point of no return.", "Let it end."),
    "too_many_connections": (
        "One user of the machine, or one address, has as many connections open as one may have (`user_connections`).",
        "Close some. Somebody else's do not count.",
    ),
    "too_many_listeners": ("Too many listen to events already.", "Ask for pages: `?after=`."),
    "too_many_peers": ("There are 1,024 peers.", "Remove one that is gone."),
    "too_many_processes": ("The job has more processes than are moved at once.", "Nothing: it stays where it is."),
    "too_many_requests": (
        "One caller asks more often than `request_rate`.",
        "Ask less often; `Retry-After` says when.",
    ),
    "too_many_streams": (
        "One user listens to events as often as one may (`user_streams`).",
        "Close some, or ask for pages: `?after=`.",
    ),
    "too_many_tokens": ("There are 1000 valid tokens.", "Revoke some."),
    "too_many_transfers": ("So many programs are coming to the other node already.", "Ask again later."),
    "too_many_webhooks": ("There are 100 webhooks.", "Remove one that nobody needs."),
    "trace_gone": ("The trace's file was removed: only the last ones are kept.", "Make another one; `traces_kept`."),
    "trace_under_way": ("A trace of the job is being made.", "Wait for it, or cancel it."),
    "transfer_dropped": ("The other node lost the program before it ran there, so it goes on here.", "Ask again."),
    "transfer_not_ready": ("The program has not arrived yet.", "Wait for it, or drop it."),
    "transfer_over": (
        "The transfer waits for no decision, and nothing is expected of it.",
        "`xmigctl transfer list` says what became of it.",
    ),
    "unauthorized": ("It is not known who calls.", "Send `Authorization: Bearer ...`."),
    "unavailable": (
        "xmigd cannot do it now: the database takes no writes, no descriptors are left.",
        "`/readyz` and the log say why; jobs go on.",
    ),
    "unknown_field": ("There is no such field or parameter.", "The reference lists them."),
    "unrecoverable": (
        "The process's memory is not completely held; it could not be recovered either.",
        "Raise `LimitNOFILE` and start the program again.",
    ),
    "wrong_host": ("The request is meant for another host: a web page may have sent it.", "Use the daemon's address."),
    "wrong_number": ("The program has another number of devices.", "Name as many as it has."),
}  # fmt: skip
