/* @FACTS@ */
/* The C interface. Errors are values: functions give a `tilewise_status`, and write what went wrong
   into `why`, which may be null. All of it may be called from several threads at once. */
#ifndef TILEWISE_H
#define TILEWISE_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  TILEWISE_OK = 0,
  TILEWISE_BAD_PROBLEM = 1, /* no such problem, or not one that this library was exported for */
  TILEWISE_NO_KERNEL = 2,   /* no kernel of this library can serve it */
  TILEWISE_BAD_DEVICE = 3,  /* device or driver do not fit */
  TILEWISE_BAD_CALL = 4,    /* a pointer, workspace or number of tensors does not fit the plan */
  TILEWISE_FAILED = 5       /* the driver or the kernel said so */
} tilewise_status;

/* Ops of this library. */
enum { @OP_ENUM@, TILEWISE_OPS };

enum { TILEWISE_MOST_WORDS = 4, TILEWISE_MOST_SIZES = 20 };

/* What to compute; the C++ front has a type of its own for each op, with names for the fields. */
typedef struct {
  int32_t op;
  int32_t words[TILEWISE_MOST_WORDS]; /* numbers of text fields, in the order of the front's enums */
  int32_t unused;
  int64_t sizes[TILEWISE_MOST_SIZES];
} tilewise_problem;

typedef struct {
  int32_t device;  /* of a GPU */
  int32_t threads; /* of CPU kernels; 0 for all cores that the process may use */
} tilewise_options;

typedef struct {
  int32_t kernel;
  double expected_us;
} tilewise_ranked;

typedef struct {
  int32_t op, kernel;
  const char *kernel_name;
  double expected_us;
  int64_t workspace_bytes;
  int64_t zeroed_bytes; /* the workspace's head that must be zero before; kernels leave it so */
} tilewise_plan_facts;

typedef struct tilewise_library tilewise_library;
typedef struct tilewise_plan tilewise_plan;

/* A device that does not fit is refused. */
tilewise_status tilewise_open(const tilewise_options *options, tilewise_library **made, char *why,
                              size_t room);
/* Plans that are still held keep what they need. */
void tilewise_close(tilewise_library *library);

int32_t tilewise_kernels(int32_t op);
const char *tilewise_kernel_name(int32_t op, int32_t kernel);
const char *tilewise_about(void);

/* Whether a kernel can serve a problem, and why not; needs no device. */
tilewise_status tilewise_why_unusable(const tilewise_problem *problem, int32_t kernel, char *why,
                                      size_t room);
/* The kernels that can serve, fastest first; `count` is the room in `ranked`, then how many there
   are. Needs no device. */
tilewise_status tilewise_rank(const tilewise_problem *problem, tilewise_ranked *ranked,
                              int32_t *count, char *why, size_t room);

/* The fastest kernel that can serve, ready to run; problems seen before are remembered. */
tilewise_status tilewise_plan_for(tilewise_library *library, const tilewise_problem *problem,
                                  tilewise_plan **made, char *why, size_t room);
/* The same with a kernel of the caller's choice. */
tilewise_status tilewise_plan_kernel(tilewise_library *library, const tilewise_problem *problem,
                                     int32_t kernel, tilewise_plan **made, char *why, size_t room);
tilewise_plan_facts tilewise_facts(const tilewise_plan *plan);
tilewise_plan *tilewise_keep(tilewise_plan *plan);
void tilewise_release(tilewise_plan *plan);

/* Runs a plan on dense tensors: the operands in order, then the result. `is_cleared` says that the
   workspace's head is zero already; otherwise it is cleared first. */
tilewise_status tilewise_execute(const tilewise_plan *plan, const void *const *tensors,
                                 int32_t count, void *workspace, int64_t workspace_bytes,
                                 void *stream, int32_t is_cleared, char *why, size_t room);

#ifdef __cplusplus
}
#endif
#endif
