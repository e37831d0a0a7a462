/* Puts faults below a program: preloaded, it stands between the program and the C library's file calls.
 *
 * FAULTS_UNDER    calls on files below this folder are ours, all others pass
 * FAULTS_CONTROL  a file of 4096 bytes, mapped here and by whoever steers (struct control; see disk.py)
 * FAULTS_UNDO     what writes replaced is appended here while control.undo is set, so that writes that nothing has synced can be
 *                 taken back when the power is "cut"
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE_EIO, WRITE_ENOSPC, WRITE_SHORT, WRITE_TORN, WRITE_LOST, READ_EIO, READ_SHORT, READ_FLIP, SYNC_EIO, MAKE_ENOSPC,
       RENAME_EIO, KINDS };
#define PAGE 4096
#define MAX_IOV 1024

struct control {
    uint64_t seed;
    uint64_t draws;
    uint32_t rates[16]; /* of each kind, in a million calls */
    uint64_t hits[16];
    uint32_t undo;
    uint32_t pad;
    int64_t wall_s;     /* added to the wall clock */
    uint32_t more[8];
    char dead[256];     /* paths that contain this answer EIO to everything; "" for none */
    char only[256];     /* rates hold for paths that contain this; "" for all */
};

static struct control *control;
static char under[PATH_MAX];
static size_t under_length;
static int undo_fd = -1;
static pthread_mutex_t undo_lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(result, name, ...) static result (*real_##name)(__VA_ARGS__)
REAL(int, open64, const char *, int, ...);
REAL(int, openat64, int, const char *, int, ...);
REAL(ssize_t, write, int, const void *, size_t);
REAL(ssize_t, read, int, void *, size_t);
REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
REAL(ssize_t, pread64, int, void *, size_t, off64_t);
REAL(ssize_t, pwritev64, int, const struct iovec *, int, off64_t);
REAL(ssize_t, preadv64, int, const struct iovec *, int, off64_t);
REAL(ssize_t, pwritev64v2, int, const struct iovec *, int, off64_t, int);
REAL(ssize_t, preadv64v2, int, const struct iovec *, int, off64_t, int);
REAL(DIR *, opendir, const char *);
REAL(int, clock_gettime, clockid_t, struct timespec *);
REAL(int, fsync, int);
REAL(int, fdatasync, int);
REAL(int, posix_fallocate64, int, off64_t, off64_t);
REAL(int, rename, const char *, const char *);
REAL(int, unlink, const char *);
REAL(int, ftruncate64, int, off64_t);
REAL(int, truncate64, const char *, off64_t);
REAL(int, statvfs64, const char *, struct statvfs64 *);

__attribute__((constructor)) static void begin(void) {
#define FIND(name) real_##name = dlsym(RTLD_NEXT, #name)
    FIND(open64); FIND(openat64); FIND(write); FIND(read); FIND(pwrite64); FIND(pread64); FIND(pwritev64); FIND(preadv64);
    FIND(fsync); FIND(fdatasync); FIND(posix_fallocate64); FIND(rename); FIND(unlink); FIND(ftruncate64); FIND(truncate64);
    FIND(statvfs64); FIND(pwritev64v2); FIND(preadv64v2); FIND(opendir);
    FIND(clock_gettime);
    const char *path = getenv("FAULTS_CONTROL"), *folder = getenv("FAULTS_UNDER"), *undo = getenv("FAULTS_UNDO");
    if (!path || !folder || !realpath(folder, under)) return;
    under_length = strlen(under);
    int fd = real_open64(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    if (undo) undo_fd = real_open64(undo, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    control = at;
}

/* ---- which calls are ours, and what befalls them */

static int is_ours(const char *path) {
    return control && strncmp(path, under, under_length) == 0 && (path[under_length] == '/' || path[under_length] == 0);
}

static int path_of(int fd, char *path) {
    if (!control) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_ours(path);
}

static int is_dead(const char *path) { return control->dead[0] && strstr(path, control->dead) != NULL; }

static uint64_t draw(void) {
    uint64_t z = control->seed + 0x9E3779B97F4A7C15ull * (1 + __atomic_fetch_add(&control->draws, 1, __ATOMIC_RELAXED));
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static int befalls(int kind, const char *path) {
    uint32_t rate = control->rates[kind];
    if (!rate || (control->only[0] && !strstr(path, control->only)) || draw() % 1000000 >= rate) return 0;
    __atomic_fetch_add(&control->hits[kind], 1, __ATOMIC_RELAXED);
    return 1;
}

/* ---- what a cut of the power takes back */

struct undo { uint64_t magic, kind, inode, offset, length, old_size, old_length; };
enum { WRITTEN, SYNCED, GONE };
#define UNDO_MAGIC 0x4f444e5544494b21ull

static void append(const struct undo *entry, const void *old) {
    struct iovec parts[2] = {{(void *)entry, sizeof *entry}, {(void *)old, entry->old_length}};
    pthread_mutex_lock(&undo_lock);
    if (writev(undo_fd, parts, old ? 2 : 1) < 0) abort();
    pthread_mutex_unlock(&undo_lock);
}

static void remember(int fd, const char *path, uint64_t offset, uint64_t length) {
    if (!control->undo || undo_fd < 0 || !length) return;
    struct stat now;
    if (fstat(fd, &now)) return;
    struct undo entry = {UNDO_MAGIC, WRITTEN, now.st_ino, offset, length, now.st_size, 0};
    char *old = NULL;
    if (offset < (uint64_t)now.st_size) {
        int again = real_open64(path, O_RDONLY | O_CLOEXEC);
        if (again >= 0) {
            old = malloc(length);
            ssize_t got = old ? real_pread64(again, old, length, offset) : -1;
            entry.old_length = got > 0 ? got : 0;
            close(again);
        }
    }
    append(&entry, old);
    free(old);
}

static void note(uint64_t kind, const struct stat *of) {
    if (!control->undo || undo_fd < 0) return;
    struct undo entry = {UNDO_MAGIC, kind, of->st_ino, 0, 0, 0, 0};
    append(&entry, NULL);
}

/* ---- opening */

static int opened(int fd_or_at, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (control && path[0] != '/') {
        char *folder = fd_or_at == AT_FDCWD ? getcwd(full, sizeof full) : path_of(fd_or_at, full) ? full : NULL;
        if (folder) { strncat(full, "/", sizeof full - strlen(full) - 1); strncat(full, path, sizeof full - strlen(full) - 1); }
    } else strncpy(full, path, sizeof full - 1), full[sizeof full - 1] = 0;
    if (is_ours(full) && is_dead(full)) { errno = EIO; return -1; }
    return real_openat64(fd_or_at, path, flags, mode);
}

#define MODE(flags, last) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list more; va_start(more, last); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE(flags, flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, flags) return opened(at, path, flags, mode); }

/* ---- writing and reading */

static size_t sum(const struct iovec *parts, int count) {
    size_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    return total;
}

/* Fewer bytes than all: whole pages where all parts are, as a device and O_DIRECT have it. */
static size_t less(const struct iovec *parts, int count) {
    size_t total = sum(parts, count), whole = 1;
    for (int i = 0; i < count; i++) whole &= parts[i].iov_len % PAGE == 0;
    if (whole && total > PAGE) return (1 + draw() % (total / PAGE - 1)) * PAGE;
    return whole ? 0 : total > 1 ? 1 + draw() % (total - 1) : 0;
}

static int first(const struct iovec *parts, int count, size_t length, struct iovec *into) {
    int n = 0;
    for (int i = 0; i < count && length; i++) {
        into[n] = parts[i];
        if (into[n].iov_len > length) into[n].iov_len = length;
        length -= into[n++].iov_len;
    }
    return n;
}

static ssize_t written(int fd, const struct iovec *parts, int count, off64_t offset) {
    char path[PATH_MAX];
    size_t total = sum(parts, count);
    if (count > MAX_IOV || !path_of(fd, path)) return offset < 0 ? writev(fd, parts, count) : real_pwritev64(fd, parts, count, offset);
    if (is_dead(path)) { errno = EIO; return -1; }
    if (befalls(WRITE_EIO, path)) { errno = EIO; return -1; }
    if (befalls(WRITE_ENOSPC, path)) { errno = ENOSPC; return -1; }
    off64_t at = offset;
    if (at < 0) {
        struct stat now;
        at = fcntl(fd, F_GETFL) & O_APPEND ? (fstat(fd, &now) ? 0 : now.st_size) : lseek64(fd, 0, SEEK_CUR);
    }
    struct iovec cut[MAX_IOV];
    const struct iovec *use = parts;
    int n = count, pretend = 0;
    if (befalls(WRITE_LOST, path)) {
        if (offset < 0) lseek64(fd, total, SEEK_CUR);
        return total;
    }
    int torn = befalls(WRITE_TORN, path);
    if (torn || befalls(WRITE_SHORT, path)) {
        size_t part = less(parts, count);
        if (part) { n = first(parts, count, part, cut); use = cut; pretend = torn; }
    }
    remember(fd, path, at, sum(use, n));
    ssize_t moved = offset < 0 ? writev(fd, use, n) : real_pwritev64(fd, use, n, offset);
    if (pretend && moved >= 0) {
        if (offset < 0 && !(fcntl(fd, F_GETFL) & O_APPEND)) lseek64(fd, total - moved, SEEK_CUR);
        return total;
    }
    return moved;
}

static ssize_t got(int fd, const struct iovec *parts, int count, off64_t offset) {
    char path[PATH_MAX];
    if (count > MAX_IOV || !path_of(fd, path)) return offset < 0 ? readv(fd, parts, count) : real_preadv64(fd, parts, count, offset);
    if (is_dead(path) || befalls(READ_EIO, path)) { errno = EIO; return -1; }
    struct iovec cut[MAX_IOV];
    const struct iovec *use = parts;
    int n = count;
    if (befalls(READ_SHORT, path)) {
        size_t part = less(parts, count);
        if (part) { n = first(parts, count, part, cut); use = cut; }
    }
    ssize_t moved = offset < 0 ? readv(fd, use, n) : real_preadv64(fd, use, n, offset);
    if (moved > 0 && befalls(READ_FLIP, path)) {
        size_t at = draw() % moved;
        for (int i = 0; i < n; i++) {
            if (at < use[i].iov_len) { ((char *)use[i].iov_base)[at] ^= 1 << draw() % 8; break; }
            at -= use[i].iov_len;
        }
    }
    return moved;
}

ssize_t write(int fd, const void *data, size_t length) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real_write(fd, data, length);
    struct iovec one = {(void *)data, length};
    return written(fd, &one, 1, -1);
}
ssize_t read(int fd, void *data, size_t length) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real_read(fd, data, length);
    struct iovec one = {data, length};
    return got(fd, &one, 1, -1);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    struct iovec one = {(void *)data, length};
    return written(fd, &one, 1, offset);
}
ssize_t pread64(int fd, void *data, size_t length, off64_t offset) {
    struct iovec one = {data, length};
    return got(fd, &one, 1, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return written(fd, parts, count, offset); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) { return got(fd, parts, count, offset); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }
ssize_t pread(int fd, void *data, size_t length, off_t offset) { return pread64(fd, data, length, offset); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return written(fd, parts, count, offset); }
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) { return got(fd, parts, count, offset); }

/* What Python calls; its flags are 0 here, and any others are none of ours. */
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return flags ? real_pwritev64v2(fd, parts, count, offset, flags) : written(fd, parts, count, offset);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return flags ? real_preadv64v2(fd, parts, count, offset, flags) : got(fd, parts, count, offset);
}

/* ---- everything else that a folder is asked */

static int synced(int fd, int (*real)(int)) {
    char path[PATH_MAX];
    struct stat of;
    if (!path_of(fd, path)) return real(fd);
    if (is_dead(path) || befalls(SYNC_EIO, path)) { errno = EIO; return -1; }
    int result = real(fd);
    if (result == 0 && !fstat(fd, &of)) note(SYNCED, &of);
    return result;
}
int fsync(int fd) { return synced(fd, real_fsync); }
int fdatasync(int fd) { return synced(fd, real_fdatasync); }

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    char path[PATH_MAX];
    if (path_of(fd, path)) {
        if (is_dead(path)) return EIO;
        if (befalls(MAKE_ENOSPC, path)) return ENOSPC;
    }
    return real_posix_fallocate64(fd, offset, length);
}
int posix_fallocate(int fd, off_t offset, off_t length) { return posix_fallocate64(fd, offset, length); }

int rename(const char *from, const char *to) {
    struct stat of;
    if (is_ours(from)) {
        if (is_dead(from) || is_dead(to) || befalls(RENAME_EIO, from)) { errno = EIO; return -1; }
        if (!stat(to, &of)) note(GONE, &of);
    }
    return real_rename(from, to);
}
int unlink(const char *path) {
    struct stat of;
    if (is_ours(path)) {
        if (is_dead(path)) { errno = EIO; return -1; }
        if (!stat(path, &of)) note(GONE, &of);
    }
    return real_unlink(path);
}
int ftruncate64(int fd, off64_t length) {
    char path[PATH_MAX];
    if (path_of(fd, path) && is_dead(path)) { errno = EIO; return -1; }
    return real_ftruncate64(fd, length);
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }
int truncate64(const char *path, off64_t length) {
    if (is_ours(path) && is_dead(path)) { errno = EIO; return -1; }
    return real_truncate64(path, length);
}
int truncate(const char *path, off_t length) { return truncate64(path, length); }
DIR *opendir(const char *path) {
    if (is_ours(path) && is_dead(path)) { errno = EIO; return NULL; }
    return real_opendir(path);
}
int statvfs64(const char *path, struct statvfs64 *into) {
    if (is_ours(path) && is_dead(path)) { errno = EIO; return -1; }
    return real_statvfs64(path, into);
}
int statvfs(const char *path, struct statvfs *into) { return statvfs64(path, (struct statvfs64 *)into); }

/* ---- the wall clock */

int clock_gettime(clockid_t clock, struct timespec *into) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_clock_gettime(clock, into);
    if (control && result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) into->tv_sec += control->wall_s;
    return result;
}
