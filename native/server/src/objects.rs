//! Objects of JSON, read strictly: no list in their place, and no name twice.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// A struct that is written as an object. By itself, `serde` takes a list of its values, too.
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Object<T>, D::Error> {
        struct Whole<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Whole<T> {
            type Value = Object<T>;

            fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
                text.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Whole(PhantomData))
    }
}

/// The values of an object by their names. By itself, `serde` takes the last of several with one name.
pub fn each_once<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct EachOnce;

    impl<'de> Visitor<'de> for EachOnce {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
            text.write_str("an object of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut found = BTreeMap::new();
            while let Some((name, value)) = map.next_entry()? {
                if found.insert(name, value).is_some() {
                    return Err(A::Error::custom("a name comes twice"));
                }
            }
            Ok(found)
        }
    }

    deserializer.deserialize_map(EachOnce)
}
