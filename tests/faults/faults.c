/* Counts the operations of a process on files below one directory, and lets one of them fail, or be the last.

   To be loaded by LD_PRELOAD. It does nothing until `faults_arm` is called, so that imports, compiles and the
   start of a backend are not counted, and nothing after `faults_disarm`.

   Each operation is a line of the log, with tabs between its fields:
     number  begin  end  name  path  other path  result  errno
   Numbers count the operations of the armed kinds, 0 for others. Begin and end are taken from one clock of all
   threads: what ended before something else began has happened before it. Paths are relative to the directory. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CHANGE = 1, READ = 2 };

enum action {
    COUNT,     /* nothing happens */
    KILL,      /* the process dies before the operation */
    TEAR,      /* the same, but of a write the first half is done */
    FAIL,      /* the operation fails */
    FAIL_FROM, /* it and every one after it fails */
    SHORTEN    /* a write does the first half and says so, as write(2) may */
};

static struct {
    char root[PATH_MAX];
    size_t root_length;
    int log, kinds, action, error;
    long at;
} plan;

static atomic_int armed;
static atomic_long count, ticks;

/* One operation that is under way. */
struct operation {
    const char *name;
    long number, begin;
    int is_hit;
    char path[PATH_MAX], other[PATH_MAX];
};

/* Returns the number of operations of the armed kinds. */
long faults_disarm(void) {
    if (atomic_exchange(&armed, 0) && plan.log >= 0) syscall(SYS_close, plan.log);
    return atomic_load(&count);
}

/* Returns 0, or an errno. The root is a real path, without symbolic links. */
int faults_arm(const char *root, const char *log, int kinds, int action, long at, int error) {
    faults_disarm();
    plan.root_length = strlen(root);
    if (plan.root_length >= sizeof plan.root) return ENAMETOOLONG;
    strcpy(plan.root, root);
    plan.log = -1;
    if (log != NULL) {
        plan.log = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
        if (plan.log < 0) return errno;
    }
    plan.kinds = kinds, plan.action = action, plan.at = at, plan.error = error;
    atomic_store(&count, 0);
    atomic_store(&ticks, 0);
    atomic_store(&armed, 1);
    return 0;
}

/* Writes a line of its own into the log: what the process has come to. */
void faults_note(const char *text) {
    char line[256];
    if (!atomic_load(&armed) || plan.log < 0) return;
    long now = atomic_fetch_add(&ticks, 1);
    int length = snprintf(line, sizeof line, "0\t%ld\t%ld\tnote\t%s\t\t0\t0\n", now, now, text);
    syscall(SYS_write, plan.log, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
}

/* The path of an open file; empty if there is none. */
static void path_of_file(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

/* The absolute form of what a call was given; links in it are not followed. */
static void absolute(int directory, const char *given, char *path) {
    if (given[0] == '/') {
        snprintf(path, PATH_MAX, "%s", given);
        return;
    }
    if (directory != AT_FDCWD) path_of_file(directory, path);
    else if (syscall(SYS_getcwd, path, PATH_MAX) < 0) path[0] = 0;
    size_t length = strlen(path);
    snprintf(path + length, PATH_MAX - length, "/%s", given);
}

/* Makes the path relative to the root; returns whether it is the root or below it. */
static int below_root(char *path) {
    size_t length = plan.root_length;
    if (strncmp(path, plan.root, length) || (path[length] != '/' && path[length] != 0)) return 0;
    memmove(path, path + length + (path[length] == '/'), strlen(path + length) + 1);
    return 1;
}

static void write_log(const struct operation *op, long result, int error) {
    if (plan.log < 0) return;
    char line[2 * PATH_MAX + 256];
    int length = snprintf(line, sizeof line, "%ld\t%ld\t%ld\t%s\t%s\t%s\t%ld\t%d\n", op->number, op->begin,
                          atomic_fetch_add(&ticks, 1), op->name, op->path, op->other, result, error);
    syscall(SYS_write, plan.log, line, length);
}

static void end_process(const struct operation *op) {
    write_log(op, -1, 0);
    syscall(SYS_kill, getpid(), SIGKILL);
}

/* Counts an operation whose path is known; kills if it is its turn. */
static void begin(struct operation *op, const char *name, enum kind kind, int is_write) {
    op->name = name, op->number = 0, op->is_hit = 0;
    op->begin = atomic_fetch_add(&ticks, 1);
    if (!(plan.kinds & kind)) return;
    op->number = atomic_fetch_add(&count, 1) + 1;
    op->is_hit = op->number == plan.at || (plan.action == FAIL_FROM && op->number > plan.at);
    if (op->is_hit && (plan.action == KILL || (plan.action == TEAR && !is_write))) end_process(op);
}

static int begin_path(struct operation *op, const char *name, enum kind kind, int directory, const char *path) {
    if (!atomic_load(&armed) || path == NULL) return 0;
    int before = errno;
    op->other[0] = 0;
    absolute(directory, path, op->path);
    int counts = below_root(op->path);
    if (counts) begin(op, name, kind, 0);
    errno = before;
    return counts;
}

static int begin_two(struct operation *op, const char *name, int directory, const char *path, int other_directory,
                     const char *other) {
    if (!atomic_load(&armed)) return 0;
    int before = errno;
    absolute(directory, path, op->path);
    absolute(other_directory, other, op->other);
    int counts = below_root(op->path);
    counts = below_root(op->other) || counts;
    if (counts) begin(op, name, CHANGE, 0);
    errno = before;
    return counts;
}

static int begin_file(struct operation *op, const char *name, enum kind kind, int fd, int is_write) {
    if (!atomic_load(&armed)) return 0;
    int before = errno;
    op->other[0] = 0;
    path_of_file(fd, op->path);
    int counts = below_root(op->path);
    if (counts) begin(op, name, kind, is_write);
    errno = before;
    return counts;
}

/* Whether the operation is not to be done, but to fail; errno says how. */
static int fails(const struct operation *op) {
    int does = op->is_hit && (plan.action == FAIL || plan.action == FAIL_FROM);
    if (does) errno = plan.error;
    return does;
}

static void end(const struct operation *op, long result) {
    int error = errno;
    write_log(op, result, result < 0 ? error : 0);
    errno = error;
}

#define REAL(name) ((__typeof__(&name))real(#name, &name##_at))

static void *real(const char *name, void **at) {
    if (*at == NULL) *at = dlsym(RTLD_NEXT, name);
    return *at;
}

/* Runs `call` as the operation that `start` begins; `failed`, a constant, is the result of one that fails. */
#define RUN(type, start, call, failed)                     \
    struct operation op;                                   \
    if (!(start)) return call;                             \
    type result = fails(&op) ? (failed) : call;            \
    end(&op, result == (type)(failed) ? -1 : (long)result); \
    return result;

/* --------------------------------------------------------------------- files are opened */

static enum kind kind_of_open(int flags) {
    return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY ? CHANGE : READ;
}

static const char *name_of_open(int flags) {
    if (flags & O_CREAT) return "create";
    return kind_of_open(flags) == CHANGE ? "open to write" : "open";
}

#define OPEN(function)                                                                                   \
    static void *function##_at;                                                                          \
    int function(const char *path, int flags, ...) {                                                     \
        va_list rest;                                                                                    \
        va_start(rest, flags);                                                                           \
        mode_t mode = va_arg(rest, mode_t);                                                              \
        va_end(rest);                                                                                    \
        RUN(int, begin_path(&op, name_of_open(flags), kind_of_open(flags), AT_FDCWD, path),              \
            REAL(function)(path, flags, mode), -1)                                                       \
    }

#define OPEN_AT(function)                                                                                \
    static void *function##_at;                                                                          \
    int function(int directory, const char *path, int flags, ...) {                                      \
        va_list rest;                                                                                    \
        va_start(rest, flags);                                                                           \
        mode_t mode = va_arg(rest, mode_t);                                                              \
        va_end(rest);                                                                                    \
        RUN(int, begin_path(&op, name_of_open(flags), kind_of_open(flags), directory, path),             \
            REAL(function)(directory, path, flags, mode), -1)                                            \
    }

#define CREATE(function)                                                                                 \
    static void *function##_at;                                                                          \
    int function(const char *path, mode_t mode) {                                                        \
        RUN(int, begin_path(&op, "create", CHANGE, AT_FDCWD, path), REAL(function)(path, mode), -1)      \
    }

#define OPEN_STREAM(function)                                                                            \
    static void *function##_at;                                                                          \
    FILE *function(const char *path, const char *mode) {                                                 \
        int flags = mode[0] == 'r' ? (strchr(mode, '+') ? O_RDWR : O_RDONLY) : O_WRONLY | O_CREAT;       \
        RUN(FILE *, begin_path(&op, name_of_open(flags), kind_of_open(flags), AT_FDCWD, path),           \
            REAL(function)(path, mode), NULL)                                                            \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
CREATE(creat)
CREATE(creat64)
OPEN_STREAM(fopen)
OPEN_STREAM(fopen64)

static void *opendir_at;
DIR *opendir(const char *path) {
    RUN(DIR *, begin_path(&op, "opendir", READ, AT_FDCWD, path), REAL(opendir)(path), NULL)
}

static int is_written(int fd) {
    int before = errno, flags = atomic_load(&armed) ? fcntl(fd, F_GETFL) : -1;
    errno = before;
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

static void *close_at;
int close(int fd) {
    struct operation op;
    if (!is_written(fd) || !begin_file(&op, "close", CHANGE, fd, 0)) return REAL(close)(fd);
    int result = REAL(close)(fd);
    if (fails(&op)) result = -1; /* It is closed all the same, as on Linux. */
    end(&op, result);
    return result;
}

/* --------------------------------------------------------------------- read and written */

#define READS(function, parameters, arguments) \
    static void *function##_at;                \
    ssize_t function parameters { RUN(ssize_t, begin_file(&op, #function, READ, fd, 0), REAL(function) arguments, -1) }

READS(read, (int fd, void *to, size_t size), (fd, to, size))
READS(pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
READS(pread64, (int fd, void *to, size_t size, off64_t at), (fd, to, size, at))
READS(readv, (int fd, const struct iovec *to, int num), (fd, to, num))
READS(preadv, (int fd, const struct iovec *to, int num, off_t at), (fd, to, num, at))
READS(preadv64, (int fd, const struct iovec *to, int num, off64_t at), (fd, to, num, at))
READS(preadv2, (int fd, const struct iovec *to, int num, off_t at, int flags), (fd, to, num, at, flags))
READS(preadv64v2, (int fd, const struct iovec *to, int num, off64_t at, int flags), (fd, to, num, at, flags))

static size_t half(size_t size) { return size > 1 ? size / 2 : size; }

/* The first half of what is to be written; returns how many parts that are. */
static int half_of(const struct iovec *from, int num, struct iovec *first) {
    size_t left = 0;
    for (int i = 0; i < num; i++) left += from[i].iov_len;
    left = half(left);
    int used = 0;
    for (; used < num && used < IOV_MAX && left > 0; used++) {
        first[used] = from[used];
        if (first[used].iov_len > left) first[used].iov_len = left;
        left -= first[used].iov_len;
    }
    return used;
}

/* A write: whole; the first half, if it is to be torn or shortened; or none of it. */
#define WRITES(function, parameters, whole, prepare, first)                        \
    static void *function##_at;                                                    \
    ssize_t function parameters {                                                  \
        struct operation op;                                                       \
        if (!begin_file(&op, #function, CHANGE, fd, 1)) return REAL(function) whole; \
        ssize_t result = -1;                                                       \
        if (op.is_hit && (plan.action == TEAR || plan.action == SHORTEN)) {        \
            prepare;                                                               \
            result = REAL(function) first;                                         \
            if (plan.action == TEAR) end_process(&op);                             \
        } else if (!fails(&op)) {                                                  \
            result = REAL(function) whole;                                         \
        }                                                                          \
        end(&op, result);                                                          \
        return result;                                                             \
    }

#define HALVE struct iovec parts[IOV_MAX]; int used = half_of(from, num, parts)

WRITES(write, (int fd, const void *from, size_t size), (fd, from, size), , (fd, from, half(size)))
WRITES(pwrite, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at), ,
       (fd, from, half(size), at))
WRITES(pwrite64, (int fd, const void *from, size_t size, off64_t at), (fd, from, size, at), ,
       (fd, from, half(size), at))
WRITES(writev, (int fd, const struct iovec *from, int num), (fd, from, num), HALVE, (fd, parts, used))
WRITES(pwritev, (int fd, const struct iovec *from, int num, off_t at), (fd, from, num, at), HALVE,
       (fd, parts, used, at))
WRITES(pwritev64, (int fd, const struct iovec *from, int num, off64_t at), (fd, from, num, at), HALVE,
       (fd, parts, used, at))

/* What copies between two files is refused, as some file systems do: callers then read and write. */
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return errno = EINVAL, -1; }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return errno = EINVAL, -1; }
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    return errno = EXDEV, -1;
}

/* --------------------------------------------------------------------- synced and truncated */

#define CHANGES(function, parameters, arguments) \
    static void *function##_at;                  \
    int function parameters { RUN(int, begin_file(&op, #function, CHANGE, fd, 0), REAL(function) arguments, -1) }

CHANGES(fsync, (int fd), (fd))
CHANGES(fdatasync, (int fd), (fd))
CHANGES(ftruncate, (int fd, off_t size), (fd, size))
CHANGES(ftruncate64, (int fd, off64_t size), (fd, size))

/* Returns an errno, unlike all others. */
#define RESERVES(function, offset)                                                            \
    static void *function##_at;                                                               \
    int function(int fd, offset at, offset size) {                                            \
        struct operation op;                                                                  \
        if (!begin_file(&op, #function, CHANGE, fd, 0)) return REAL(function)(fd, at, size);  \
        int failed = fails(&op) ? errno : REAL(function)(fd, at, size);                       \
        end(&op, failed ? -1 : 0);                                                            \
        return failed;                                                                        \
    }

RESERVES(posix_fallocate, off_t)
RESERVES(posix_fallocate64, off64_t)

/* --------------------------------------------------------------------- names are made and removed */

#define NAMES(function, name, directory, parameters, arguments) \
    static void *function##_at;                                 \
    int function parameters { RUN(int, begin_path(&op, name, CHANGE, directory, path), REAL(function) arguments, -1) }

NAMES(mkdir, "mkdir", AT_FDCWD, (const char *path, mode_t mode), (path, mode))
NAMES(mkdirat, "mkdir", at, (int at, const char *path, mode_t mode), (at, path, mode))
NAMES(rmdir, "rmdir", AT_FDCWD, (const char *path), (path))
NAMES(unlink, "unlink", AT_FDCWD, (const char *path), (path))
NAMES(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", at, (int at, const char *path, int flags),
      (at, path, flags))
NAMES(remove, "unlink", AT_FDCWD, (const char *path), (path))
NAMES(symlink, "symlink", AT_FDCWD, (const char *target, const char *path), (target, path))
NAMES(symlinkat, "symlink", at, (const char *target, int at, const char *path), (target, at, path))
NAMES(truncate, "truncate", AT_FDCWD, (const char *path, off_t size), (path, size))
NAMES(truncate64, "truncate", AT_FDCWD, (const char *path, off64_t size), (path, size))

#define TWO_NAMES(function, name, at, other_at, parameters, arguments) \
    static void *function##_at;                                        \
    int function parameters {                                          \
        RUN(int, begin_two(&op, name, at, path, other_at, other), REAL(function) arguments, -1) \
    }

TWO_NAMES(rename, "rename", AT_FDCWD, AT_FDCWD, (const char *path, const char *other), (path, other))
TWO_NAMES(renameat, "rename", from, to, (int from, const char *path, int to, const char *other),
          (from, path, to, other))
TWO_NAMES(renameat2, "rename", from, to,
          (int from, const char *path, int to, const char *other, unsigned flags), (from, path, to, other, flags))
TWO_NAMES(link, "link", AT_FDCWD, AT_FDCWD, (const char *path, const char *other), (path, other))
TWO_NAMES(linkat, "link", from, to, (int from, const char *path, int to, const char *other, int flags),
          (from, path, to, other, flags))
