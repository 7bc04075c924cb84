/* @FACTS@ */
/* The C interface. Errors are values: functions give a `tilewise_status`, and write what went wrong
   into `why`, which may be null, cut to `room` bytes. Nothing is thrown; pointers that are null where
   something is needed are refused, and what cannot be made is set to null. All of it may be called
   from several threads at once, but for closing a library that another one uses. */
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
  TILEWISE_BAD_CALL = 4,    /* a pointer, an option, a workspace or a number of tensors does not fit */
  TILEWISE_FAILED = 5       /* the driver or the kernel said so */
} tilewise_status;

/* Ops of this library. What their problems have, in order; words are told by number, from 0:@OP_FIELDS@ */
enum { @OP_ENUM@, TILEWISE_OPS };

enum { TILEWISE_MOST_WORDS = 4, TILEWISE_MOST_SIZES = 20 };

/* What to compute; the C++ front has types that name the fields. */
typedef struct {
  int32_t op;
  int32_t words[TILEWISE_MOST_WORDS]; /* numbers of text fields */
  int32_t unused;
  int64_t sizes[TILEWISE_MOST_SIZES];
} tilewise_problem;

typedef struct {
  int32_t device;  /* of a GPU, by the driver's number */
  int32_t threads; /* of CPU kernels, at most 4096; 0 for all cores that the process may use */
} tilewise_options;

/* A kernel of the op by its number, and what it is expected to take. */
typedef struct {
  int32_t kernel;
  double expected_us;
} tilewise_ranked;

/* What a plan came to. */
typedef struct {
  int32_t op, kernel;
  const char *kernel_name;
  double expected_us;
  int64_t workspace_bytes;
  int64_t zeroed_bytes; /* the workspace's head that must be zero before; kernels leave it so */
} tilewise_plan_facts;

typedef struct tilewise_library tilewise_library; /* one device */
typedef struct tilewise_plan tilewise_plan;       /* a kernel that is ready for one problem */

/* A device or driver that does not fit is refused. Options that are null are the usual ones. */
tilewise_status tilewise_open(const tilewise_options *options, tilewise_library **made, char *why,
                              size_t room);
/* Plans that are still held keep what they need; kernels that a GPU has loaded stay loaded. */
void tilewise_close(tilewise_library *library);

/* How many kernels an op has, and their names: 0 and "" where there is no such op or kernel. */
int32_t tilewise_kernels(int32_t op);
const char *tilewise_kernel_name(int32_t op, int32_t kernel);
/* Which version of tilewise wrote the library, for what, from which models. */
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
/* Plans count their holders: what makes or keeps one releases it. */
tilewise_plan *tilewise_keep(tilewise_plan *plan);
void tilewise_release(tilewise_plan *plan);

/* Runs a plan on dense tensors: the operands in order, then the result; `count` is how many. On a
   GPU addresses are the device's and multiples of 16, the workspace's too, `stream` is a CUstream or
   hipStream_t, and the call returns before the work is done. `is_cleared` says that the workspace's
   head is zero already; otherwise it is cleared first. */
tilewise_status tilewise_execute(const tilewise_plan *plan, const void *const *tensors,
                                 int32_t count, void *workspace, int64_t workspace_bytes,
                                 void *stream, int32_t is_cleared, char *why, size_t room);

#ifdef __cplusplus
}
#endif
#endif
