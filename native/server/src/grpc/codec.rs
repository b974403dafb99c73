//! Messages as gRPC sends them.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Bytes of a buffer, which each call has for its request and for its response. It grows if need be.
const BUFFER: usize = 1024;

/// Reads messages `In` and writes messages `Out`.
pub struct Prost<In, Out>(PhantomData<(In, Out)>);

impl<In, Out> Default for Prost<In, Out> {
    fn default() -> Prost<In, Out> {
        Prost(PhantomData)
    }
}

/// Reads or writes messages `M`.
pub struct Coder<M>(PhantomData<M>);

impl<In, Out> Codec for Prost<In, Out>
where
    In: Message + Default + Send + 'static,
    Out: Message + Send + 'static,
{
    type Encode = Out;
    type Decode = In;
    type Encoder = Coder<Out>;
    type Decoder = Coder<In>;

    fn encoder(&mut self) -> Coder<Out> {
        Coder(PhantomData)
    }

    fn decoder(&mut self) -> Coder<In> {
        Coder(PhantomData)
    }
}

impl<M: Message> Encoder for Coder<M> {
    type Item = M;
    type Error = Status;

    fn encode(&mut self, message: M, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER, BUFFER)
    }
}

impl<M: Message + Default> Decoder for Coder<M> {
    type Item = M;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<M>, Status> {
        M::decode(buffer).map(Some).map_err(|error| Status::invalid_argument(format!("the message: {error}")))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER, BUFFER)
    }
}
