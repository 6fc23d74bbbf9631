// A cuDNN 9.1 that does nothing. Legacy functions succeed; the graph API finds no engine, so an
// operator that uses it fails.
#include <stddef.h>

#define CUDNN_VERSION 90100
#define NOT_SUPPORTED 3000  // CUDNN_STATUS_NOT_SUPPORTED
#define WORKSPACE 1024      // bytes

#define SUCCEEDS(name) \
    int name() { return 0; }
#define IS_NOT_SUPPORTED(name) \
    int name() { return NOT_SUPPORTED; }
#define CREATES(name)             \
    int name(void **handle) {     \
        static long created[512]; \
        *handle = created;        \
        return 0;                 \
    }

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
const char *cudnnGetErrorString(int status) { return "cuDNN status"; }

CREATES(cudnnCreate)
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreateLRNDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateRNNDataDescriptor)
CREATES(cudnnCreateRNNDescriptor)
CREATES(cudnnCreateReduceTensorDescriptor)
CREATES(cudnnCreateTensorDescriptor)

IS_NOT_SUPPORTED(cudnnBackendCreateDescriptor)
IS_NOT_SUPPORTED(cudnnBackendExecute)
IS_NOT_SUPPORTED(cudnnBackendFinalize)
IS_NOT_SUPPORTED(cudnnBackendGetAttribute)
IS_NOT_SUPPORTED(cudnnBackendSetAttribute)

SUCCEEDS(cudnnActivationForward)
SUCCEEDS(cudnnAddTensor)
SUCCEEDS(cudnnBackendDestroyDescriptor)
SUCCEEDS(cudnnBatchNormalizationForwardInference)
SUCCEEDS(cudnnBatchNormalizationForwardTraining)
SUCCEEDS(cudnnConvolutionBiasActivationForward)
SUCCEEDS(cudnnConvolutionForward)
SUCCEEDS(cudnnDeriveBNTensorDescriptor)
SUCCEEDS(cudnnDestroy)
SUCCEEDS(cudnnDestroyActivationDescriptor)
SUCCEEDS(cudnnDestroyConvolutionDescriptor)
SUCCEEDS(cudnnDestroyDropoutDescriptor)
SUCCEEDS(cudnnDestroyFilterDescriptor)
SUCCEEDS(cudnnDestroyLRNDescriptor)
SUCCEEDS(cudnnDestroyPoolingDescriptor)
SUCCEEDS(cudnnDestroyRNNDataDescriptor)
SUCCEEDS(cudnnDestroyRNNDescriptor)
SUCCEEDS(cudnnDestroyReduceTensorDescriptor)
SUCCEEDS(cudnnDestroyTensorDescriptor)
SUCCEEDS(cudnnFinalize)
SUCCEEDS(cudnnFindConvolutionForwardAlgorithmEx)
SUCCEEDS(cudnnGetConvolutionForwardAlgorithm_v7)
SUCCEEDS(cudnnGetConvolutionForwardWorkspaceSize)
SUCCEEDS(cudnnGetLastErrorString)
SUCCEEDS(cudnnGetRNNWeightParams)
SUCCEEDS(cudnnGetStream)
SUCCEEDS(cudnnGetTensorNdDescriptor)
SUCCEEDS(cudnnLRNCrossChannelForward)
SUCCEEDS(cudnnPoolingForward)
SUCCEEDS(cudnnRNNForward)
SUCCEEDS(cudnnReduceTensor)
SUCCEEDS(cudnnSetActivationDescriptor)
SUCCEEDS(cudnnSetConvolutionGroupCount)
SUCCEEDS(cudnnSetConvolutionMathType)
SUCCEEDS(cudnnSetConvolutionNdDescriptor)
SUCCEEDS(cudnnSetDropoutDescriptor)
SUCCEEDS(cudnnSetFilterNdDescriptor)
SUCCEEDS(cudnnSetLRNDescriptor)
SUCCEEDS(cudnnSetPoolingNdDescriptor)
SUCCEEDS(cudnnSetRNNDataDescriptor)
SUCCEEDS(cudnnSetRNNDescriptor_v8)
SUCCEEDS(cudnnSetReduceTensorDescriptor)
SUCCEEDS(cudnnSetStream)
SUCCEEDS(cudnnSetTensorNdDescriptor)
SUCCEEDS(cudnnSoftmaxForward)

static int give(size_t *target, size_t size) {
    if (target) *target = size;
    return 0;
}

int cudnnDropoutGetStatesSize(void *handle, size_t *size) { return give(size, WORKSPACE); }
int cudnnGetRNNWeightSpaceSize(void *handle, void *rnn, size_t *size) { return give(size, 1 << 20); }
int cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *from, void *to, size_t *size) { return give(size, WORKSPACE); }
int cudnnGetReductionIndicesSize(void *handle, void *reduction, void *from, void *to, size_t *size) { return give(size, 0); }

int cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *data, size_t *work, size_t *reserve) {
    give(reserve, WORKSPACE);
    return give(work, WORKSPACE);
}
