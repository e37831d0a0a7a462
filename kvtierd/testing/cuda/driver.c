/* Stands in for the CUDA driver (libcuda.so.1) where there is no GPU: its memory is shared memory of the host.
 *
 * It offers what kvtierd calls, with the driver's own prototypes. An "address on the GPU" is one of this process, so tests
 * can look at the bytes.
 *
 * FAKE_CUDA_DEVICES  UUIDs of the GPUs that the process sees: 32 hexadecimal digits each, with commas between them
 * FAKE_CUDA_BYTES    memory of each GPU
 * FAKE_CUDA_FAULTS   a folder: as long as it has a file with the name of a function, calls of that wait for as many milliseconds as
 *                    the file says, and then fail if the number is 0
 *
 * Memory that is freed while another process has it open is an error of the daemon's: the process aborts.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };
#define MAX_REGIONS 4096
#define MAX_DEVICES 16
#define MAX_DEPTH 16

struct region {
    CUdeviceptr address;
    size_t size;
    int fd;
    int device;
    int imported;
};

struct name { /* what is in a CUipcMemHandle */
    char magic[8];
    int32_t pid;
    int32_t fd;
    uint64_t size;
    char uuid[16];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region regions[MAX_REGIONS];
static char uuids[MAX_DEVICES][16];
static int devices;
static size_t device_bytes, used_bytes[MAX_DEVICES];
static _Thread_local intptr_t contexts[MAX_DEPTH];
static _Thread_local int depth;

static CUresult fault(const char *function) {
    const char *folder = getenv("FAKE_CUDA_FAULTS");
    char path[4096];
    long wait_ms = 0;
    if (!folder) return SUCCESS;
    snprintf(path, sizeof path, "%s/%s", folder, function);
    FILE *file = fopen(path, "r");
    if (!file) return SUCCESS;
    if (fscanf(file, "%ld", &wait_ms) != 1) wait_ms = 0;
    fclose(file);
    if (!wait_ms) return NOT_SUPPORTED;
    usleep(wait_ms * 1000);
    return SUCCESS;
}
#define FAULTS do { CUresult f = fault(__func__); if (f) return f; } while (0)
#define CONTEXT do { if (!depth) return INVALID_CONTEXT; } while (0)

static struct region *find(CUdeviceptr address, size_t size) {
    for (int i = 0; i < MAX_REGIONS; i++) {
        struct region *r = &regions[i];
        if (r->size && r->address <= address && address + size <= r->address + r->size) return r;
    }
    return NULL;
}

static struct region *add(int fd, size_t size, int device, int imported) {
    void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) return NULL;
    for (int i = 0; i < MAX_REGIONS; i++) {
        if (!regions[i].size) {
            regions[i] = (struct region){(CUdeviceptr)(uintptr_t)address, size, fd, device, imported};
            return &regions[i];
        }
    }
    munmap(address, size);
    return NULL;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

CUresult cuInit(unsigned flags) {
    FAULTS;
    const char *text = getenv("FAKE_CUDA_DEVICES"), *bytes = getenv("FAKE_CUDA_BYTES");
    (void)flags;
    devices = 0;
    for (; text && *text && devices < MAX_DEVICES; devices++) {
        for (int i = 0; i < 16; i++) {
            unsigned byte = 0;
            if (sscanf(text + 2 * i, "%2x", &byte) != 1) return INVALID_VALUE;
            uuids[devices][i] = (char)byte;
        }
        text += 32;
        if (*text == ',') text++;
    }
    device_bytes = bytes ? strtoull(bytes, NULL, 10) : (size_t)1 << 30;
    return devices ? SUCCESS : NO_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
    FAULTS;
    *count = devices;
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    FAULTS;
    if (ordinal < 0 || ordinal >= devices) return INVALID_VALUE;
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    FAULTS;
    memcpy(uuid->bytes, uuids[device], 16);
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    FAULTS;
    snprintf(name, size, "stand-in %d", device);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    FAULTS;
    (void)device;
    *bytes = device_bytes;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    FAULTS;
    *context = (void *)(intptr_t)(device + 1);
    return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(void *context) {
    FAULTS;
    if (depth == MAX_DEPTH || !context) return INVALID_CONTEXT;
    contexts[depth++] = (intptr_t)context;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **context) {
    FAULTS;
    CONTEXT;
    *context = (void *)contexts[--depth];
    return SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    FAULTS;
    CONTEXT;
    int device = (int)contexts[depth - 1] - 1;
    CUresult result = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (size && used_bytes[device] + size <= device_bytes) {
        int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
        struct region *made = fd < 0 || ftruncate(fd, (off_t)size) ? NULL : add(fd, size, device, 0);
        if (made) {
            memset((void *)(uintptr_t)made->address, 0x5a, size); /* what somebody has left there */
            used_bytes[device] += size;
            *address = made->address;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    FAULTS;
    CONTEXT;
    char path[64];
    pthread_mutex_lock(&lock);
    struct region *r = find(address, 1);
    if (!r || r->address != address || r->imported) {
        pthread_mutex_unlock(&lock);
        return INVALID_VALUE;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", r->fd);
    int again = open(path, O_RDWR | O_CLOEXEC); /* locks belong to what open() makes */
    if (again < 0 || flock(again, LOCK_EX | LOCK_NB)) {
        fprintf(stderr, "fake CUDA driver: memory is freed that another process has open\n");
        abort();
    }
    close(again);
    fallocate(r->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)r->size);
    munmap((void *)(uintptr_t)r->address, r->size);
    close(r->fd);
    used_bytes[r->device] -= r->size;
    r->size = 0;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size) {
    FAULTS;
    CONTEXT;
    if (!find(address, size)) return INVALID_VALUE;
    memset((void *)(uintptr_t)address, value, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size) {
    FAULTS;
    CONTEXT;
    if (!find(target, size)) return INVALID_VALUE;
    memcpy((void *)(uintptr_t)target, source, size);
    return SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size) {
    FAULTS;
    CONTEXT;
    if (!find(source, size)) return INVALID_VALUE;
    memcpy(target, (void *)(uintptr_t)source, size);
    return SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, void *stream) {
    FAULTS;
    CONTEXT;
    if (!find(source, size) || !stream) return INVALID_VALUE;
    memcpy(target, (void *)(uintptr_t)source, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, void *stream) {
    FAULTS;
    CONTEXT;
    if (!find(target, size) || !stream) return INVALID_VALUE;
    memcpy((void *)(uintptr_t)target, source, size);
    return SUCCESS;
}

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    FAULTS;
    CONTEXT;
    (void)flags;
    *address = malloc(size);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuStreamCreate(void **stream, unsigned flags) {
    FAULTS;
    CONTEXT;
    (void)flags;
    *stream = malloc(1);
    return SUCCESS;
}

CUresult cuStreamSynchronize(void *stream) {
    FAULTS;
    CONTEXT;
    (void)stream;
    return SUCCESS;
}

CUresult cuEventCreate(void **event, unsigned flags) {
    FAULTS;
    CONTEXT;
    (void)flags;
    *event = malloc(1);
    return SUCCESS;
}

CUresult cuEventRecord(void *event, void *stream) {
    FAULTS;
    CONTEXT;
    return event && stream ? SUCCESS : INVALID_VALUE;
}

CUresult cuEventSynchronize(void *event) {
    FAULTS;
    CONTEXT;
    return event ? SUCCESS : INVALID_VALUE;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    FAULTS;
    CONTEXT;
    struct region *r = find(address, 1);
    if (!r || r->imported || r->address != address) return INVALID_VALUE;
    struct name name = {"fakecuda", getpid(), r->fd, r->size, {0}};
    memcpy(name.uuid, uuids[r->device], 16);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    FAULTS;
    CONTEXT;
    struct name name;
    char path[64];
    int device = -1;
    (void)flags;
    memcpy(&name, &handle, sizeof name);
    for (int i = 0; i < devices; i++) {
        if (!memcmp(uuids[i], name.uuid, 16)) device = i;
    }
    if (memcmp(name.magic, "fakecuda", 8) || device < 0) return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct region *made = flock(fd, LOCK_SH | LOCK_NB) ? NULL : add(fd, name.size, device, 1);
    pthread_mutex_unlock(&lock);
    if (!made) {
        close(fd);
        return INVALID_VALUE;
    }
    *address = made->address;
    return SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    FAULTS;
    CONTEXT;
    pthread_mutex_lock(&lock);
    struct region *r = find(address, 1);
    CUresult result = INVALID_VALUE;
    if (r && r->imported && r->address == address) {
        munmap((void *)(uintptr_t)r->address, r->size);
        close(r->fd);
        r->size = 0;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
