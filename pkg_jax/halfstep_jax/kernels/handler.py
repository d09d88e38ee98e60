"""The handler of XLA's custom calls in C: it finds a kernel by name, and calls it on the buffers of leaves.

It is compiled once. Kernels are other libraries, which a process registers before XLA runs them. A program
has the name of a kernel, and no address. So it may be kept in a persistent cache.

Arguments: keys, uint32 [columns, leaves]; numbers, float32; then `inputs` arrays for each leaf. Results:
`outputs` arrays for each leaf. Attributes:

    columns  for each array of a kernel's table: which output it is, or -1 - which input
    aliases  for each output: which input it overwrites, or -1
    fields   of each leaf, `c_driver.FIELDS`
    inputs   arrays that a leaf reads
    kernel   the name
"""

HANDLER = r"""
#include <fenv.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "xla/ffi/api/c_api.h"

typedef void (*Work)(void *);
typedef void (*Team)(Work, void *, unsigned, unsigned);
typedef void (*Kernel)(int64_t, const int64_t *, const uint32_t *, const float *, const int32_t *, int32_t,
                       int64_t, int32_t, Team);

/* Kernels by name. Entries are added, and none is removed. */
typedef struct Entry { struct Entry *next; Kernel step; char name[64]; } Entry;
static Entry *entries = NULL;

int halfstep_register(const char *name, Kernel step) {
  Entry *entry = malloc(sizeof(Entry));
  if (!entry || strlen(name) >= sizeof(entry->name)) { free(entry); return 1; }
  strcpy(entry->name, name);
  entry->step = step;
  entry->next = __atomic_load_n(&entries, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(&entries, &entry->next, entry, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return 0;
}

static Kernel kernel_of(const XLA_FFI_ByteSpan *name) {
  for (Entry *e = __atomic_load_n(&entries, __ATOMIC_ACQUIRE); e; e = e->next)
    if (strlen(e->name) == name->len && !memcmp(e->name, name->ptr, name->len)) return e->step;
  return NULL;
}

/* A team of XLA's threads. The caller takes every share that no thread has begun, so it waits for none that
   may never run; a thread that comes late finds nothing to do, and the last one frees the record. */
typedef struct {
  Work work; void *data;
  int shares, taken, done, users;
  fenv_t floats; /* of the caller: XLA's threads may take subnormal numbers for zero */
  pthread_mutex_t lock; pthread_cond_t ended;
} Shared;

static __thread XLA_FFI_CallFrame *frame_of_thread;

/* Whether there is an error, which is destroyed. */
static int has_failed(XLA_FFI_CallFrame *f, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {.struct_size = sizeof(args), .error = error};
  f->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

static void release(Shared *s) {
  if (__atomic_sub_fetch(&s->users, 1, __ATOMIC_ACQ_REL)) return;
  pthread_mutex_destroy(&s->lock);
  pthread_cond_destroy(&s->ended);
  free(s);
}

static void take_shares(Shared *s) {
  while (__atomic_fetch_add(&s->taken, 1, __ATOMIC_RELAXED) < s->shares) {
    s->work(s->data);
    pthread_mutex_lock(&s->lock);
    if (++s->done == s->shares) pthread_cond_signal(&s->ended);
    pthread_mutex_unlock(&s->lock);
  }
}

static void task(void *data) {
  Shared *s = data;
  fenv_t own;
  fegetenv(&own);
  fesetenv(&s->floats);
  take_shares(s);
  fesetenv(&own);
  release(s);
}

static void team(Work work, void *data, unsigned threads, unsigned flags) {
  (void)flags;
  XLA_FFI_CallFrame *f = frame_of_thread;
  Shared *s = malloc(sizeof(Shared));
  if (!s) {
    for (unsigned i = 0; i < threads; i++) work(data);
    return;
  }
  s->work = work; s->data = data; s->shares = (int)threads; s->taken = s->done = 0; s->users = 1;
  fegetenv(&s->floats);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->ended, NULL);
  for (unsigned i = 1; i < threads; i++) {
    __atomic_add_fetch(&s->users, 1, __ATOMIC_ACQ_REL);
    XLA_FFI_ThreadPool_Schedule_Args args = {sizeof(args), NULL, f->ctx, task, s};
    if (has_failed(f, f->api->XLA_FFI_ThreadPool_Schedule(&args))) {
      release(s);
      break;
    }
  }
  take_shares(s);
  pthread_mutex_lock(&s->lock);
  while (s->done < s->shares) pthread_cond_wait(&s->ended, &s->lock);
  pthread_mutex_unlock(&s->lock);
  release(s);
}

static XLA_FFI_Error *failed(XLA_FFI_CallFrame *f, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = sizeof(args), .message = message, .errc = code};
  return f->api->XLA_FFI_Error_Create(&args);
}

static void *attribute(XLA_FFI_CallFrame *f, const char *name) {
  for (int64_t i = 0; i < f->attrs.size; i++) {
    XLA_FFI_ByteSpan *span = f->attrs.names[i];
    if (strlen(name) == span->len && !memcmp(name, span->ptr, span->len)) return f->attrs.attrs[i];
  }
  return NULL;
}

static int32_t threads_of(XLA_FFI_CallFrame *f) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {sizeof(args), NULL, f->ctx, &threads};
  if (has_failed(f, f->api->XLA_FFI_ThreadPool_NumThreads(&args))) return 1;
  return (int32_t)(threads < 1 ? 1 : threads);
}

XLA_FFI_Error *halfstep_step(XLA_FFI_CallFrame *f) {
  XLA_FFI_Extension_Base *extension = f->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return NULL;
  }
  if (f->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  XLA_FFI_ByteSpan *name = attribute(f, "kernel");
  XLA_FFI_Array *columns = attribute(f, "columns"), *aliases = attribute(f, "aliases");
  XLA_FFI_Array *fields = attribute(f, "fields");
  XLA_FFI_Scalar *inputs_of = attribute(f, "inputs");
  if (!name || !columns || !aliases || !fields || !inputs_of)
    return failed(f, XLA_FFI_Error_Code_INVALID_ARGUMENT, "halfstep: the custom call lacks an attribute.");
  Kernel step = kernel_of(name);
  if (!step)
    return failed(f, XLA_FFI_Error_Code_NOT_FOUND,
                  "halfstep: this program was compiled in another process, and this one lacks its kernel. "
                  "Compile the step here: its kernel is then built or found.");
  const int64_t inputs = *(int64_t *)inputs_of->value, outputs = (int64_t)aliases->size;
  const int64_t count = (int64_t)columns->size, leaves = (int64_t)fields->size / 5, width = 5 + count;
  if (f->args.size != 2 + leaves * inputs || f->rets.size != leaves * outputs)
    return failed(f, XLA_FFI_Error_Code_INVALID_ARGUMENT, "halfstep: the custom call has arrays of no leaf.");
  int64_t *table = malloc((size_t)(leaves * width) * sizeof(int64_t)), elements = 0;
  if (!table) return failed(f, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "halfstep: no memory for a table.");
  for (int64_t leaf = 0; leaf < leaves; leaf++) {
    XLA_FFI_Buffer **in = (XLA_FFI_Buffer **)f->args.args + 2 + leaf * inputs;
    XLA_FFI_Buffer **out = (XLA_FFI_Buffer **)f->rets.rets + leaf * outputs;
    memcpy(table + leaf * width, (int64_t *)fields->data + leaf * 5, 5 * sizeof(int64_t));
    elements += table[leaf * width];
    for (int64_t i = 0; i < outputs; i++) {
      const int64_t over = ((int64_t *)aliases->data)[i];
      if (over >= 0 && in[over]->data != out[i]->data) {
        free(table);
        return failed(f, XLA_FFI_Error_Code_INTERNAL, "halfstep: a result does not overwrite its argument.");
      }
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = ((int64_t *)columns->data)[i];
      table[leaf * width + 5 + i] = (int64_t)(at >= 0 ? out[at] : in[-1 - at])->data;
    }
  }
  XLA_FFI_Buffer *keys = f->args.args[0], *numbers = f->args.args[1];
  frame_of_thread = f;
  step(leaves, table, keys->data, numbers->data, NULL, 0, elements, threads_of(f), team);
  free(table);
  return NULL;
}
"""
