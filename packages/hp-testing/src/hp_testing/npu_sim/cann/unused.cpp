// What libtorch_npu asks of CANN and the simulation has nothing behind. libtorch_npu is linked so that every function
// that it names has to be there when it is loaded.
#include <cstdint>
#include <cstdio>

// These headers are not included: one line a function is all that is needed, whatever its arguments.
#define SIM_FUNCTION extern "C" __attribute__((visibility("default")))

// Calls that may be ignored: they succeed.
#define IGNORED(name) \
  SIM_FUNCTION int64_t name() { return 0; }

// Calls whose result would be missed: they say so and fail.
#define REFUSED(name)                                                        \
  SIM_FUNCTION int64_t name() {                                              \
    std::fprintf(stderr, "npu simulation: %s is not simulated\n", #name);    \
    return 100000; /* ACL_ERROR_INVALID_PARAM */                             \
  }

// Logs, profiles and dumps.
IGNORED(aclAppLog)
IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)
IGNORED(aclmdlFinalizeDump)
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)

// Limits of a stream's cores, as the kernels that a thread issues have them.
IGNORED(aclrtUnuseStreamResInCurrentThread)
IGNORED(aclrtUseStreamResInCurrentThread)

// Attributes of device kernels; the two kernels that are simulated have none that matter.
IGNORED(aclopCreateAttr)
IGNORED(aclopDestroyAttr)
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)

// Settings without a meaning here.
IGNORED(aclrtCtxSetSysParamOpt)
IGNORED(aclrtSetSysParamOpt)
IGNORED(aclrtSetDeviceSatMode)
IGNORED(aclrtSetOpWaitTimeout)
IGNORED(aclrtSetOpExecuteTimeOut)
IGNORED(aclrtPeekAtLastError)
IGNORED(aclrtGetLastError)

// Virtual memory (expandable segments), kernels in binary form, memory shared between processes.
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtUnmapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtGetFunctionAddr)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)

// Questions that are answered with zero.
SIM_FUNCTION int aclrtDeviceGetBareTgid(int32_t* process) { *process = 0; return 0; }
SIM_FUNCTION int aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) { *actual = 0; return 0; }
SIM_FUNCTION int aclrtGetSysParamOpt(int, int64_t* value) { *value = 0; return 0; }
SIM_FUNCTION int aclGetDeviceCapability(uint32_t, int, int64_t* value) { *value = 0; return 0; }
SIM_FUNCTION int aclGetCannAttribute(int, int32_t* value) { *value = 0; return 0; }
SIM_FUNCTION int aclGetCannAttributeList(const int** list, size_t* number) { *list = nullptr; *number = 0; return 0; }
