/* Slurm's options --xmig and --xmig-checkpoint.
 *
 * It runs in srun, sbatch and salloc, which read the options, and in slurmstepd, where it puts a command before the
 * task's: `slurm-task`, which starts the task under xMIG (xmigctl slurm task). Everything else is done there, in the
 * user's name. The task's argument vector is changed in its place and not made longer: what Slurm does between this
 * and the execution (TaskProlog, limits) stays as it is.
 *
 * Prolog and epilog get SPANK_XMIG: "run" or "strict", and then what --xmig-checkpoint says.
 *
 * plugstack.conf: optional PATH/xmig_spank.so [task=PATH]
 */
#include <slurm/spank.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(xmig, 1)

#ifndef XMIG_SLURM_TASK
#define XMIG_SLURM_TASK "/usr/libexec/xmig/slurm-task"
#endif

enum { FAILED = -1 }; /* Slurm takes no notice of what is positive */

static char mode[16];       /* empty: not under xMIG */
static char checkpoint[16]; /* empty: none; "0": none by the clock; otherwise seconds between two of them */
static char* task_program;  /* stays: an element of the task's arguments */

/* sbatch passes an option without a value as NULL, and slurmstepd gets it as an empty one. */
static int has_value(const char* given) { return given != NULL && given[0] != '\0'; }

static int take_mode(int value, const char* given, int remote) {
  (void)value, (void)remote;
  if (!has_value(given)) {
    strcpy(mode, "run");
  } else if (strcmp(given, "strict") == 0) {
    strcpy(mode, "strict");
  } else {
    slurm_error("--xmig=%s: write --xmig or --xmig=strict", given);
    return FAILED;
  }
  return ESPANK_SUCCESS;
}

static int take_checkpoint(int value, const char* given, int remote) {
  (void)value, (void)remote;
  const char* seconds = has_value(given) ? given : "0";
  size_t digits = strspn(seconds, "0123456789");
  if (digits == 0 || seconds[digits] != '\0' || digits > 7 || (has_value(given) && atoi(given) < 2)) {
    slurm_error("--xmig-checkpoint=%s: write seconds between two checkpoints, at least 2", seconds);
    return FAILED;
  }
  strcpy(checkpoint, seconds);
  return ESPANK_SUCCESS;
}

static struct spank_option options[] = {
    {"xmig", "strict", "run the job under xMIG; strict: end it when it gets at the genuine driver", 2, 0, take_mode},
    {"xmig-checkpoint", "SECONDS",
     "with --xmig: keep a checkpoint when the job is requeued, and every SECONDS; it goes on from the last one", 2, 0,
     take_checkpoint},
    SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t spank, int argc, char** argv) {
  (void)argc, (void)argv;
  for (struct spank_option* option = options; option->name != NULL; ++option) {
    if (spank_option_register(spank, option) != ESPANK_SUCCESS) {
      slurm_error("xmig: the option --%s cannot be registered", option->name);
      return FAILED;
    }
  }
  return ESPANK_SUCCESS;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char** argv) {
  (void)argc, (void)argv;
  if (checkpoint[0] != '\0' && mode[0] == '\0') {
    slurm_error("--xmig-checkpoint needs --xmig");
    return FAILED;
  }
  if (mode[0] == '\0' || spank_remote(spank) == 1) return ESPANK_SUCCESS;
  char both[sizeof mode + sizeof checkpoint + 1];
  snprintf(both, sizeof both, "%s %s", mode, checkpoint);
  spank_job_control_setenv(spank, "XMIG", both, 1); /* a step of an allocation has no prolog of its own */
  return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argc, char** argv) {
  if (mode[0] == '\0') return ESPANK_SUCCESS;
  const char* program = XMIG_SLURM_TASK;
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "task=", 5) == 0) program = argv[i] + 5;
  }
  int count = 0;
  char** arguments = NULL;
  task_program = strdup(program);
  if (task_program == NULL || spank_get_item(spank, S_JOB_ARGV, &count, &arguments) != ESPANK_SUCCESS || count < 1 ||
      spank_setenv(spank, "XMIG_SLURM_COMMAND", arguments[0], 1) != ESPANK_SUCCESS ||
      spank_setenv(spank, "XMIG_SLURM_MODE", mode, 1) != ESPANK_SUCCESS ||
      spank_setenv(spank, "XMIG_SLURM_CHECKPOINT", checkpoint, 1) != ESPANK_SUCCESS) {
    slurm_error("xmig: the task cannot be started under xMIG");
    return FAILED;
  }
  arguments[0] = task_program;
  return ESPANK_SUCCESS;
}
